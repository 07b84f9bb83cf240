//! What a rank was built from, and for which machine: all ranks of a communicator must have the same build.
//!
//! ```
//! use ncclx_rs::comm::bootstrap::Build;
//! assert!(Build::own().to_string().starts_with(env!("CARGO_PKG_VERSION")));
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// What decides which bytes a rank sends. Ranks of different builds may misread each other or run different algorithms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// The version of this crate, for the reader of an error.
    pub version: String,
    /// A fingerprint of this crate's sources, computed by `build.rs`.
    pub sources: String,
    /// The byte order of numbers in memory: `little` or `big`.
    pub byte_order: String,
    /// The size of an address in bits.
    pub pointer_bits: u32,
}

impl Build {
    /// The build of this process.
    pub fn own() -> Build {
        Build {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            sources: env!("SOURCES_FINGERPRINT").to_owned(),
            byte_order: if cfg!(target_endian = "little") { "little" } else { "big" }.to_owned(),
            pointer_bits: usize::BITS,
        }
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Build { version, sources, byte_order, pointer_bits } = self;
        write!(f, "{version} of sources {sources} ({byte_order}-endian, {pointer_bits} bits)")
    }
}
