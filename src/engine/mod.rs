//! Drives operations over transports and completes their works.
//!
//! The files stand on floors. Each floor owns its state, uses only the floors above it in this table, and returns what
//! happened instead of calling further down. `tests/engine/tidy.rs` holds the files to that.
//!
//! | floor | files | what they hold |
//! |---|---|---|
//! | data | `region`, `body`, `reduce` | an operation's memory, a message's payload, arithmetic |
//! | | `call`, `plan`, `completion` | what was called, how it runs, what is told of bytes that have left or come |
//! | | `frame`, `heartbeat` | the format on the wire, and what waiting ranks say beside it |
//! | | `failures`, `wait_policy`, `vain_looks` | what follows from a failure, how a thread waits, for how long to look at a stream |
//! | | `flight_recorder` | the last operations |
//! | | `per_rank` | a number for each rank, of most of which none is known |
//! | queues | `recv_buffer`, `inbox`, `outbox` | bytes into frames, and frames into bytes |
//! | calls | `request`, `owed` | a collective as it is called, and what has yet to be heard of one that has ended |
//! | | `absent_ranks` | what ranks do that have not called one |
//! | | `device_waits` | who waits in one on devices |
//! | endpoints | `agenda` | which streams a turn looks at |
//! | | `connector`, `peers`, `endpoint` | the streams to other ranks, and what their ends mean |
//! | rendezvous | `copying` | by which way of two a message comes, by what was measured |
//! | | `single_copy`, `rndv`, `buffered_send` | long messages, which wait for their receivers |
//! | | `remote_reads` | what is read in other ranks' memory without their help |
//! | protocols | `context` | what all protocols get with a call |
//! | | `collective`, `message`, `window` | one kind of operation each; none knows another |
//! | | `relay`, `device_messages` | what collectives on devices send to other hosts, and messages between devices |
//! | | `device_accesses` | accesses to windows of devices on other hosts |
//! | engine | `progress` | all state behind one lock, the loop, and who is told what is done |
//! | | `fast_path` | operations that end in the call that submits them |
//! | | `shutdown`, `dump` | ends that nothing can go on after, and the flight recorder as a file |
//! | threads | `callbacks`, `driver` | which thread calls back, and which makes progress |

pub(crate) mod absent_ranks;
pub(crate) mod agenda;
pub(crate) mod body;
pub(crate) mod buffered_send;
pub(crate) mod call;
pub(crate) mod callbacks;
pub(crate) mod collective;
pub(crate) mod completion;
pub(crate) mod connector;
pub(crate) mod context;
mod copying;
pub(crate) mod device_accesses;
pub(crate) mod device_messages;
pub(crate) mod device_waits;
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
pub(crate) mod owed;
pub(crate) mod peers;
pub(crate) mod per_rank;
pub(crate) mod plan;
pub(crate) mod progress;
pub(crate) mod question;
pub(crate) mod recv_buffer;
pub mod reduce;
pub(crate) mod region;
pub(crate) mod relay;
pub(crate) mod remote_reads;
pub(crate) mod request;
pub(crate) mod rndv;
pub(crate) mod shutdown;
pub(crate) mod single_copy;
pub(crate) mod vain_looks;
pub(crate) mod wait_policy;
pub(crate) mod window;
