//! Drives operations over transports and completes their works.
//!
//! `core` holds all state of a communicator's operations, behind one lock; `driver` decides which thread makes
//! progress, `cpu` how it waits, `callbacks` which one tells of an end. Collectives run one after the other in the order
//! issued (`collective`); point-to-point messages run beside them (`message`), and so do accesses to windows (`window`).
//! What can end in the call that submits it does (`at_once`). `heartbeat` tells who waits in a collective; `loss` ends what
//! the departure of a rank makes impossible. `reach` opens the stream to a rank, by the `way` that leads there. `lending`
//! lets a receiver read long messages out of the sender's memory, and `detach` ends sends that wait for each other.
//! `frame` is the format on the wire. `recorder` remembers the last operations, and `dump` writes them down.

pub(crate) mod at_once;
#[cfg(any(test, fuzzing))]
pub(crate) mod by_hand;
pub(crate) mod call;
pub(crate) mod callbacks;
pub(crate) mod collective;
pub(crate) mod core;
pub(crate) mod cpu;
pub(crate) mod detach;
pub(crate) mod driver;
pub(crate) mod dump;
pub(crate) mod frame;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod heartbeat;
pub(crate) mod inbox;
pub(crate) mod lending;
pub(crate) mod loss;
pub(crate) mod memory;
pub(crate) mod message;
pub(crate) mod outbox;
pub(crate) mod plan;
pub(crate) mod reach;
pub(crate) mod recorder;
pub mod reduce;
pub(crate) mod way;
pub(crate) mod window;
