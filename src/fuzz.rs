//! Fuzz targets of the parsers of bytes from outside (`make fuzz`, tests/fuzz). `cargo test` replays the corpus.
//!
//! A target takes any bytes. It fails by a panic: the parser's own, or that of a check that must hold for every input.

mod handles;
mod handshake;
mod settings;

/// Reads any bytes.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: &[(&str, Target)] = &[
    ("bootstrap", crate::comm::bootstrap::fuzz::bootstrap),
    ("config", settings::config),
    ("frames", crate::engine::fuzz::frames),
    ("handles", handles::handles),
    ("handshake", handshake::handshake),
    ("rails", crate::transport::tcp::fuzz::rails),
    ("rdma", crate::rdma::fuzz::rdma),
    ("store", crate::comm::store::fuzz::store),
    ("ucx", crate::transport::ucx::fuzz::ucx),
];

/// Runs the target of that name.
///
/// # Panics
/// When the target fails, or there is none of that name.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target");
    target(bytes);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_the_fuzzer_has_kept_is_read_or_refused() {
        let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
        for (name, target) in TARGETS {
            let mut inputs: Vec<_> = std::fs::read_dir(corpora.join(name)).expect("a corpus").flatten().collect();
            inputs.sort_by_key(|input| input.path());
            assert!(!inputs.is_empty(), "{name} has no corpus");
            for input in inputs {
                println!("{}", input.path().display()); // shown when it fails
                target(&std::fs::read(input.path()).expect("an input"));
            }
        }
    }
}
