//! One place to sleep for everything a communicator waits for.
