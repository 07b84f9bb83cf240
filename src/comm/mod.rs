//! The communicator: lifecycle and rendezvous.
