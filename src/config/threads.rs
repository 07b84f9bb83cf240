//! The setting of how many threads share long copies and reductions.

/// How many threads share a long copy or reduction with the one that makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// As many as the rank has CPUs to spare.
    Auto,
    /// So many.
    Exactly(usize),
}

impl Threads {
    /// As they are written, in words.
    pub(super) const FORM: &'static str = "auto or a whole number up to 255";

    /// Reads it as it is written.
    pub(super) fn read(text: &str) -> Option<Threads> {
        match text {
            "auto" => Some(Threads::Auto),
            text => text.parse::<u8>().ok().map(|threads| Threads::Exactly(threads.into())),
        }
    }
}
