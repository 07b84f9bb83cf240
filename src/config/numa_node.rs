//! The setting of which NUMA node a rank is on.

/// Which NUMA node a rank is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumaNode {
    /// That of the CPUs which it may run on, if they belong to one of several.
    Auto,
    /// None.
    Off,
    /// This one.
    Exactly(u32),
}

impl NumaNode {
    /// As they are written, in words.
    pub(super) const FORM: &'static str = "auto, off or a whole number up to 1023";

    /// The largest number that any kernel has.
    pub const MAX: u32 = 1023;

    /// Reads it as it is written.
    pub(super) fn read(text: &str) -> Option<NumaNode> {
        match text {
            "auto" => Some(NumaNode::Auto),
            "off" => Some(NumaNode::Off),
            text => text.parse().ok().filter(|number| *number <= NumaNode::MAX).map(NumaNode::Exactly),
        }
    }

    /// The node's number, where it is told or has been found.
    pub fn number(self) -> Option<u32> {
        match self {
            NumaNode::Exactly(number) => Some(number),
            NumaNode::Auto | NumaNode::Off => None,
        }
    }
}
