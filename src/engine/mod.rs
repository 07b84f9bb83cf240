//! Drives operations over transports and completes their works.
//!
//! `progress` holds all state of a communicator's operations, behind one lock; `driver` decides which thread makes
//! progress, `wait_policy` how it waits, `callbacks` which one tells of an end. Collectives run one after the other in the order
//! issued (`collective`); point-to-point messages run beside them (`message`), and so do accesses to windows (`window`).
//! What can end in the call that submits it does (`fast_path`). `heartbeat` tells who waits in a collective; `failures` ends what
//! the departure of a rank makes impossible. `reach` opens the stream to a rank, by the `connector` that leads there. `single_copy`
//! lets a receiver read long messages out of the sender's memory, and `buffered_send` ends sends that wait for each other.
//! `frame` is the format on the wire. `flight_recorder` remembers the last operations, and `dump` writes them down.

pub(crate) mod body;
pub(crate) mod buffered_send;
pub(crate) mod call;
pub(crate) mod callbacks;
pub(crate) mod collective;
pub(crate) mod completion;
pub(crate) mod connector;
pub(crate) mod context;
pub(crate) mod driver;
pub(crate) mod dump;
pub(crate) mod endpoint;
pub(crate) mod failures;
pub(crate) mod fast_path;
pub(crate) mod flight_recorder;
pub(crate) mod frame;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod heartbeat;
pub(crate) mod inbox;
pub(crate) mod message;
#[cfg(any(test, fuzzing))]
pub(crate) mod mock_peer;
pub(crate) mod outbox;
pub(crate) mod plan;
pub(crate) mod progress;
pub(crate) mod recv_buffer;
pub mod reduce;
pub(crate) mod region;
pub(crate) mod rndv;
pub(crate) mod shutdown;
pub(crate) mod single_copy;
pub(crate) mod wait_policy;
pub(crate) mod window;
