//! The setting of how many connections carry a stream.

/// How many connections carry a stream by TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpStreams(usize);

impl TcpStreams {
    /// One connection.
    pub const ONE: TcpStreams = TcpStreams(1);

    /// The most.
    pub const MAX: usize = 16;

    /// So many, if they may be.
    pub(super) fn new(streams: usize) -> Option<TcpStreams> {
        (1..=TcpStreams::MAX).contains(&streams).then_some(TcpStreams(streams))
    }

    /// The number.
    pub fn get(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn a_stream_has_one_to_sixteen_connections() {
        let streams = |text: &str| Config::resolve_with(&|_| None, &[("tcp_streams".to_owned(), text.to_owned())]);
        for (text, number) in [("", 1), ("1", 1), ("16", 16)] {
            assert_eq!(streams(text).unwrap().tcp_streams.get(), number);
        }
        for wrong in ["0", "17", "-1", "two", "1.5"] {
            let error = streams(wrong).unwrap_err().to_string();
            assert_eq!(error, format!("the hint tcp_streams is `{wrong}`: expected a whole number from 1 to 16"));
        }
    }
}
