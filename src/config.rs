//! The only reader of environment variables and hints.
