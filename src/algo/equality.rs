//! Whether all blocks of an all_to_all are equal. A rank knows its own alone, also where these are all equal, since another rank
//! may have called with others. Where a message to every rank costs more than to ask, the ranks combine two words first, and then
//! take what is the fastest for the blocks that they have.

use crate::algo::collective::Collective;
use crate::algo::select;

/// Whether so many ranks ask before they exchange blocks. Of a communicator that names an algorithm for that they do not.
pub(crate) fn is_asked(collective: &Collective, ranks: usize, named: Option<&str>) -> bool {
    let is_named = || named.is_some_and(|name| [select::DIRECT, select::FORWARDING].contains(&name));
    matches!(collective, Collective::AllToAll { .. }) && ranks >= MIN_RANKS && !is_named()
}

/// What a rank says of its blocks, of which the ranks take the least, word by word.
pub(crate) fn words(collective: &Collective) -> [u64; 2] {
    let Collective::AllToAll { send, recv } = collective else { return [0; 2] };
    let is_equal = send.are_equal() && send == recv;
    if is_equal { [send[0] as u64, !(send[0] as u64)] } else { [0; 2] }
}

/// What the ranks exchange that have called `collective` and said at least so much.
pub(crate) fn answered(collective: Collective, least: [u64; 2]) -> Collective {
    let [shortest, longest] = [least[0], !least[1]];
    if shortest == longest { Collective::EqualAllToAll { count: shortest as usize } } else { collective }
}

/// The same for so many ranks, each of which has called `collective`.
pub(super) fn called_by_all(collective: &Collective, ranks: usize) -> Collective {
    match is_asked(collective, ranks, None) {
        true => answered(collective.clone(), words(collective)),
        false => collective.clone(),
    }
}

/// In smaller worlds the answer takes longer, beside the exchange of unequal blocks, than is worth what it saves that of equal ones.
const MIN_RANKS: usize = 65;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::Counts;

    #[test]
    fn all_ranks_must_have_blocks_of_the_same_length() {
        let blocks = |send: [usize; 2], recv: [usize; 2]| Collective::AllToAll {
            send: Counts::from(send.to_vec()),
            recv: Counts::from(recv.to_vec()),
        };
        let equal = |count| blocks([count; 2], [count; 2]);
        for (calls, count) in [
            (vec![equal(3); 3], Some(3)),
            (vec![equal(0); 2], Some(0)),
            (vec![equal(usize::MAX / 2); 2], Some(usize::MAX / 2)),
            (vec![equal(3), equal(4)], None),
            (vec![equal(0), equal(1)], None),
            (vec![equal(3), blocks([3, 3], [3, 4])], None),
            (vec![equal(0), blocks([1, 0], [0, 0])], None),
            (vec![equal(3), blocks([3, 3], [4, 4])], None),
            (vec![blocks([1, 2], [2, 1]); 2], None),
        ] {
            let said = calls.iter().map(words);
            let least = said.fold([u64::MAX; 2], |least, said| [0, 1].map(|word| least[word].min(said[word])));
            for call in calls {
                let expected = count.map_or(call.clone(), |count| Collective::EqualAllToAll { count });
                assert_eq!(answered(call, least), expected);
            }
        }
    }
}
