//! The setting of what runs operations on tensors of devices.

use serde::{Deserialize, Serialize};

/// What runs operations on tensors of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineChoice {
    /// What is the better way: streams on NVIDIA's devices, as long as none has shown otherwise, and RCCL on AMD's.
    Auto,
    /// Programs for streams.
    Streams,
    /// NVIDIA's library, or an error.
    Nccl,
    /// AMD's library, or an error.
    Rccl,
    /// The engine of the CPU, through memory of the host.
    Host,
    /// A vendor's library within the ranks that are alike, the engine of the CPU between these and others.
    Mixed,
}

impl EngineChoice {
    /// As they are written, in words.
    pub(super) const FORM: &'static str = "auto, streams, nccl, rccl, host or mixed";

    /// Reads it as it is written.
    pub(super) fn read(text: &str) -> Option<EngineChoice> {
        use EngineChoice::{Auto, Host, Mixed, Nccl, Rccl, Streams};
        [Auto, Streams, Nccl, Rccl, Host, Mixed].into_iter().find(|choice| choice.name() == text)
    }

    /// Whether tensors of devices go through memory of the host, where nothing else is the better way.
    pub fn goes_through_host(self) -> bool {
        matches!(self, EngineChoice::Host | EngineChoice::Mixed)
    }

    /// As the setting has it.
    pub fn name(self) -> &'static str {
        match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Streams => "streams",
            EngineChoice::Nccl => "nccl",
            EngineChoice::Rccl => "rccl",
            EngineChoice::Host => "host",
            EngineChoice::Mixed => "mixed",
        }
    }
}
