//! What watchers tell each other.

use crate::engine::loss::{Departed, Departure};
use crate::error::LinkDown;
use crate::types::Rank;

/// Something that one rank tells another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// The sender leaves, which is no loss.
    Bye,
    /// A rank is gone: the sender itself, or another.
    Departed(Departed),
}

const BYE: u8 = 1;
const LOST: u8 = 2;
const LEFT: u8 = 3;

/// Kind, rank, number of collectives, length of the text; little endian.
const HEADER_BYTES: usize = 1 + 4 + 8 + 2;

/// The longest text.
const CAUSE_MAX: usize = 1024;

impl News {
    /// The news as bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, rank, called, cause) = match self {
            News::Bye => (BYE, Rank(0), 0, ""),
            News::Departed(Departed { rank, how: Departure::Lost, cause }) => (LOST, *rank, 0, cause.as_str()),
            News::Departed(Departed { rank, how: Departure::Left { called }, cause }) => {
                (LEFT, *rank, *called, cause.as_str())
            }
        };
        let mut end = cause.len().min(CAUSE_MAX);
        while !cause.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&rank.0.to_le_bytes());
        bytes.extend_from_slice(&called.to_le_bytes());
        bytes.extend_from_slice(&(end as u16).to_le_bytes());
        bytes.extend_from_slice(&cause.as_bytes()[..end]);
        bytes
    }

    /// The first news in `bytes` and its length; nothing while it is not complete.
    pub(super) fn decode(bytes: &[u8], size: usize) -> Result<Option<(News, usize)>, LinkDown> {
        let Some((header, text)) = bytes.split_at_checked(HEADER_BYTES) else { return Ok(None) };
        let rank = Rank(u32::from_le_bytes(std::array::from_fn(|i| header[1 + i])));
        let called = u64::from_le_bytes(std::array::from_fn(|i| header[5 + i]));
        let len = usize::from(u16::from_le_bytes([header[13], header[14]]));
        let how = match header[0] {
            BYE => None,
            LOST => Some(Departure::Lost),
            LEFT => Some(Departure::Left { called }),
            kind => return Err(LinkDown::new(format!("it sent news of unknown kind {kind}"))),
        };
        if len > CAUSE_MAX || rank.index() >= size {
            return Err(LinkDown::new(format!("it sent news of rank {rank} with {len} bytes")));
        }
        let Some(text) = text.get(..len) else { return Ok(None) };
        let news = match how {
            None => News::Bye,
            Some(how) => News::Departed(Departed { rank, how, cause: String::from_utf8_lossy(text).into_owned() }),
        };
        Ok(Some((news, HEADER_BYTES + len)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn news_survive_the_wire(rank in 0u32..9, called: Option<u64>, cause in ".{0,40}", behind: Vec<u8>) {
            let how = called.map_or(Departure::Lost, |called| Departure::Left { called });
            let news = News::Departed(Departed { rank: Rank(rank), how, cause });
            let bytes = news.encode();
            let len = bytes.len();
            prop_assert_eq!(News::decode(&bytes[..len - 1], 9), Ok(None));
            prop_assert_eq!(News::decode(&[bytes, behind].concat(), 9), Ok(Some((news, len))));
        }

        #[test]
        fn arbitrary_bytes_are_news_or_refused(bytes: Vec<u8>) {
            if let Ok(Some((_, len))) = News::decode(&bytes, 9) {
                prop_assert!(len <= bytes.len());
            }
        }
    }

    #[test]
    fn long_causes_are_cut_between_characters() {
        let cause = "é".repeat(CAUSE_MAX);
        let news = News::Departed(Departed { rank: Rank(0), how: Departure::Lost, cause }).encode();
        let Ok(Some((News::Departed(departed), len))) = News::decode(&news, 1) else { panic!("no news") };
        assert_eq!((departed.cause.len(), len), (CAUSE_MAX, news.len()));
        assert_eq!(News::decode(&News::Bye.encode(), 1), Ok(Some((News::Bye, HEADER_BYTES))));
        assert!(News::decode(&[9; 64], 1).is_err(), "an unknown kind");
    }
}
