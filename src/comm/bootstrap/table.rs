//! The table of all ranks as bytes: what ranks have in common is said once.
//!
//! Every rank gets the whole table from rank 0, so that its size counts with the square of the world's. A rank is told as what
//! differs from the last rank of the same host before it, or from the rank before it where there is none:
//!
//! ```text
//! the number of ranks
//! of each rank   its host: a number; if it is new, the bytes of its name
//!                fields: what is common to all, CPUs, process, the transports' names; then an address for each of these
//! a field        0: the same as there; else, one more than how many bytes differ, how many before and how many after them
//!                do not, and those that do
//! ```
//!
//! A number is as long as it needs to be: seven bits a byte, the lowest first, and another byte follows one of 128 or more.

use std::collections::HashMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::protocol::{INFO_BYTES_MAX, TABLE_BYTES_MAX};
use super::rank_info::{Addresses, Common, RankInfo};
use crate::sync::Arc;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::types::Rank;

/// A rank without its number and its host.
#[derive(Clone, Default, PartialEq)]
struct Fields(Vec<Vec<u8>>);

/// The fields before the addresses.
const LEADING: usize = 4;

impl Fields {
    fn of(info: &RankInfo) -> Fields {
        let RankInfo { common, cpus, process, addresses, .. } = info;
        let leading = [json(common), json(cpus), json(process), json(addresses.transports())];
        Fields(leading.into_iter().chain(addresses.all().map(<[u8]>::to_vec)).collect())
    }

    /// The field at this place; empty if there is none.
    fn get(&self, place: usize) -> &[u8] {
        self.0.get(place).map_or(&[], Vec::as_slice)
    }

    /// Makes the field at this place, behind those before it, what comes next. False: it is as it was.
    fn update(&mut self, place: usize, rest: &mut &[u8]) -> Result<bool, String> {
        if place == self.0.len() {
            self.0.push(vec![]);
        }
        let Some(field) = take_difference(rest, &self.0[place])? else { return Ok(false) };
        self.0[place] = field;
        Ok(true)
    }

    /// The same, and what the field says. `before` is what it said.
    fn read<T: Clone + DeserializeOwned>(
        &mut self,
        place: usize,
        rest: &mut &[u8],
        before: Option<&T>,
    ) -> Result<T, String> {
        let differs = self.update(place, rest)?;
        before.filter(|_| !differs).map_or_else(|| parsed(&self.0[place]), |before| Ok(before.clone()))
    }

    /// The next rank, by the rank that these are the fields of.
    fn next(
        &mut self,
        rank: Rank,
        host_id: Arc<str>,
        before: Option<&RankInfo>,
        rest: &mut &[u8],
    ) -> Result<RankInfo, String> {
        let common = self.read::<Arc<Common>>(0, rest, before.map(|info| &info.common))?;
        let cpus = self.read::<Cpus>(1, rest, before.map(|info| &info.cpus))?;
        let mut process = self.read::<ProcessId>(2, rest, before.map(|info| &info.process))?;
        before.inspect(|info| process.share(&info.process));
        let transports = self.read::<Arc<[String]>>(3, rest, before.map(|info| info.addresses.transports()))?;
        let count = LEADING + transports.len();
        for place in LEADING..count {
            self.update(place, rest)?;
        }
        self.0.truncate(count);
        let addresses = Addresses::new(transports, self.0[LEADING..].iter().map(Vec::as_slice));
        Ok(RankInfo { rank, host_id, addresses, process, cpus, common })
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("numbers and texts are JSON")
}

fn parsed<T: DeserializeOwned>(json: &[u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| error.to_string())
}

/// The ranks that later ones are told by: the last one of each host, and the last one.
#[derive(Default)]
struct Before {
    of_host: Vec<(Option<usize>, Fields)>,
    last: usize,
}

impl Before {
    /// The rank that the next one, of this host, is told by, and its fields, which become those of the next.
    fn next(&mut self, host: usize, rank: usize) -> (Option<usize>, &mut Fields) {
        if host == self.of_host.len() {
            self.of_host.push(self.of_host.get(self.last).cloned().unwrap_or_default());
        }
        self.last = host;
        let (before, fields) = &mut self.of_host[host];
        (before.replace(rank), fields)
    }
}

/// The table as bytes. The error says that it is too long.
pub(super) fn encode(ranks: &[RankInfo]) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let (mut hosts, mut before): (HashMap<&str, usize>, Before) = Default::default();
    let mut budget = Budget(TABLE_BYTES_MAX);
    put_number(&mut bytes, ranks.len());
    for (rank, info) in ranks.iter().enumerate() {
        let next = hosts.len();
        let host = *hosts.entry(&info.host_id).or_insert(next);
        put_number(&mut bytes, host);
        if host == next {
            put_number(&mut bytes, info.host_id.len());
            bytes.extend(info.host_id.as_bytes());
        }
        let (fields, (_, base)) = (Fields::of(info), before.next(host, rank));
        budget.take(&info.host_id, &fields)?;
        fields.0.iter().enumerate().for_each(|(place, field)| put_difference(&mut bytes, base.get(place), field));
        *base = fields;
    }
    Ok(bytes)
}

/// Whether so many ranks, whose descriptions are as long as this one, can be in a table. The error says why not.
pub(super) fn fits(info: &RankInfo, ranks: usize) -> Result<(), String> {
    Budget(TABLE_BYTES_MAX / ranks).take(&info.host_id, &Fields::of(info))
}

/// The ranks of a table that is one, of `size` ranks. The error says what is wrong with it.
pub(super) fn decode(bytes: &[u8], size: usize) -> Result<Vec<RankInfo>, String> {
    let mut rest = bytes;
    let (mut hosts, mut before): (Vec<Arc<str>>, Before) = Default::default();
    let mut budget = Budget(TABLE_BYTES_MAX);
    let count = take_number(&mut rest)?;
    if count != size {
        return Err(format!("it has {count} ranks, not {size}"));
    }
    let mut ranks: Vec<RankInfo> = Vec::with_capacity(size);
    for rank in 0..size {
        let host = take_number(&mut rest)?;
        if host == hosts.len() {
            let length = take_number(&mut rest)?;
            let name = str::from_utf8(take(&mut rest, length)?);
            hosts.push(name.map_err(|error| error.to_string())?.into());
        }
        let host_id = hosts.get(host).ok_or_else(|| format!("rank {rank} is of host {host}, which is none"))?;
        let (told_by, fields) = before.next(host, rank);
        let info = fields.next(Rank::from(rank), host_id.clone(), told_by.map(|before| &ranks[before]), &mut rest)?;
        budget.take(host_id, fields)?;
        ranks.push(info);
    }
    if rest.is_empty() { Ok(ranks) } else { Err(format!("{} bytes follow it", rest.len())) }
}

/// How many bytes the descriptions of ranks may have yet. A few bytes of a table may stand for many.
struct Budget(usize);

impl Budget {
    fn take(&mut self, host_id: &str, fields: &Fields) -> Result<(), String> {
        let bytes = host_id.len() + fields.0.iter().map(Vec::len).sum::<usize>();
        if bytes > INFO_BYTES_MAX {
            return Err(format!("the description of a rank of {bytes} bytes is longer than {INFO_BYTES_MAX}"));
        }
        let left = self.0.checked_sub(bytes);
        self.0 =
            left.ok_or_else(|| format!("the descriptions of all ranks are longer than {TABLE_BYTES_MAX} bytes"))?;
        Ok(())
    }
}

fn put_difference(bytes: &mut Vec<u8>, base: &[u8], field: &[u8]) {
    if base == field {
        return put_number(bytes, 0);
    }
    let before = base.iter().zip(field).take_while(|(a, b)| a == b).count();
    let (base, field) = (&base[before..], &field[before..]);
    let after = base.iter().rev().zip(field.iter().rev()).take_while(|(a, b)| a == b).count();
    let differing = &field[..field.len() - after];
    put_number(bytes, differing.len() + 1);
    put_number(bytes, before);
    put_number(bytes, after);
    bytes.extend(differing);
}

/// What comes next and differs from `base`; none if it is the same.
fn take_difference(rest: &mut &[u8], base: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let Some(length) = take_number(rest)?.checked_sub(1) else { return Ok(None) };
    let (before, after) = (take_number(rest)?, take_number(rest)?);
    let differing = take(rest, length)?;
    match (base.get(..before), base.len().checked_sub(after).and_then(|from| base.get(from..))) {
        (Some(before), Some(after)) => Ok(Some([before, differing, after].concat())),
        _ => Err("it refers to bytes that are not there".to_owned()),
    }
}

fn put_number(bytes: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take_number(rest: &mut &[u8]) -> Result<usize, String> {
    let mut number = 0;
    for place in 0..NUMBER_BYTES_MAX {
        let byte = take(rest, 1)?[0];
        number |= usize::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err("it has a number that is too long".to_owned())
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (taken, behind) = rest.split_at_checked(count).ok_or("it ends too early")?;
    *rest = behind;
    Ok(taken)
}

/// The most bytes of a number, which is of 28 bits then.
const NUMBER_BYTES_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::comm::bootstrap::build::Build;
    use crate::config::EngineChoice;

    /// Rank `rank` of `size` with eight on each host, bound to a core each, as ranks of a real job describe themselves.
    fn real(rank: usize, size: usize) -> RankInfo {
        // As spread as random ones, and the same each time.
        let scatter = |seed: usize| (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let token = |seed| [scatter(seed).to_le_bytes(), scatter(seed + 1).to_le_bytes()].concat();
        let host = rank / 8;
        let port = |seed| scatter(seed) >> 50 | 0x4000;
        let address = |port| {
            let (high, low) = (host / 256, host % 256);
            format!("{{\"hosts\":[\"10.0.{high}.{low}\",\"fd00::{high}:{low}\"],\"port\":{port}}}").into_bytes()
        };
        let boot = format!("{:016x}{:016x}", scatter(host), scatter(host + 77));
        let process = format!(
            "{{\"namespace\":\"{boot} 4026531836\",\"number\":{}}}",
            scatter(host) % 4_000_000 + rank as u64 % 8
        );
        RankInfo {
            rank: Rank::from(rank),
            host_id: format!("{boot}/4026531840").into(),
            addresses: BTreeMap::from([
                ("shm".to_owned(), token(4 * rank)),
                ("shm failure detector".to_owned(), token(4 * rank + 2)),
                ("tcp".to_owned(), address(port(2 * rank))),
                ("tcp failure detector".to_owned(), address(port(2 * rank + 1))),
            ])
            .into(),
            process: serde_json::from_str(&process).expect("a process"),
            cpus: Cpus::new([rank as u32 % 8], None),
            common: Arc::new(Common {
                build: Build::own(),
                world_size: size as u32,
                name: "default_pg".to_owned(),
                algorithm: None,
                through_host: None,
            }),
        }
    }

    #[test]
    fn a_rank_of_a_large_world_takes_less_than_a_hundred_bytes() {
        for size in [64, 2_000] {
            let ranks: Vec<RankInfo> = (0..size).map(|rank| real(rank, size)).collect();
            let bytes = encode(&ranks).expect("short enough");
            let json = serde_json::to_vec(&ranks[size / 2]).expect("JSON").len();
            let each = bytes.len() / size;
            assert!(each < 100, "{each} bytes a rank in a world of {size}, where {json} of JSON tell the same");
            assert_eq!(decode(&bytes, size).as_deref(), Ok(&ranks[..]));
        }
    }

    #[test]
    fn ranks_that_have_little_in_common_are_told_as_well() {
        let mut ranks: Vec<RankInfo> = (0..6).map(|rank| real(7 * rank, 6)).collect();
        ranks.iter_mut().enumerate().for_each(|(rank, info)| info.rank = Rank::from(rank));
        ranks[1].addresses = BTreeMap::new().into();
        ranks[2].host_id = "".into();
        let common = Arc::make_mut(&mut ranks[3].common);
        (common.algorithm, common.through_host) = (Some("ring".to_owned()), Some(EngineChoice::Mixed));
        ranks[3].host_id = ranks[0].host_id.clone();
        let mut addresses = BTreeMap::from(ranks[4].addresses.clone());
        addresses.insert("another".to_owned(), vec![7; 300]);
        ranks[4].addresses = addresses.into();
        Arc::make_mut(&mut ranks[5].common).name = "ä".repeat(100);
        assert_eq!(decode(&encode(&ranks).expect("short enough"), 6), Ok(ranks));
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let ranks: Vec<RankInfo> = (0..9).map(|rank| real(rank, 9)).collect();
        let bytes = encode(&ranks).expect("short enough");
        assert_eq!(decode(&bytes, 8), Err("it has 9 ranks, not 8".to_owned()));
        for end in 0..bytes.len() {
            assert_eq!(decode(&bytes[..end], 9), Err("it ends too early".to_owned()), "after {end} bytes");
        }
        let refused = |bytes: &[u8], cause: &str| {
            let error = decode(bytes, 9).expect_err(cause);
            assert!(error.contains(cause), "{error}");
        };
        refused(&[&bytes[..], &[0]].concat(), "1 bytes follow it");
        refused(&[9, 1], "rank 0 is of host 1, which is none");
        refused(&[9, 0, 1, 0xff], "utf-8");
        refused(&[9, 0, 0, 1, 1, 0], "bytes that are not there");
        refused(&[9, 0xff, 0xff, 0xff, 0xff, 0], "a number that is too long");
        refused(&[9, 0, 0, 0, 0, 0, 0], "EOF");
    }

    /// Ranks that say nothing but "the same as before" of a long description take no more memory than rank 0 sends.
    #[test]
    fn a_short_table_of_long_descriptions_is_refused() {
        let size = TABLE_BYTES_MAX / INFO_BYTES_MAX + 20;
        let long = |rank: usize, bytes: usize| RankInfo {
            addresses: BTreeMap::from([("tcp".to_owned(), vec![7; bytes])]).into(),
            ..real(rank % 8, size)
        };
        let ranks: Vec<RankInfo> = (0..size).map(|rank| long(rank, INFO_BYTES_MAX - 1000)).collect();
        let error = encode(&ranks).expect_err("too long");
        assert!(error.starts_with("the descriptions of all ranks are longer"), "{error}");
        let error = encode(&[long(0, INFO_BYTES_MAX)]).expect_err("too long");
        assert!(error.starts_with("the description of a rank"), "{error}");
        let mut bytes = encode(&ranks[..1]).expect("short enough");
        bytes.splice(..1, size_bytes(size));
        (1..size).for_each(|_| bytes.extend([0; 1 + LEADING + 1]));
        let error = decode(&bytes, size).expect_err("too long");
        assert!(error.starts_with("the descriptions of all ranks are longer"), "{error}");
    }

    fn size_bytes(size: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_number(&mut bytes, size);
        bytes
    }

    proptest! {
        #[test]
        fn any_field_comes_back_from_its_difference(base: Vec<u8>, field: Vec<u8>, common in 0..20usize) {
            let field = [&base[..common.min(base.len())], &field[..], &base[base.len().saturating_sub(common)..]].concat();
            let mut bytes = Vec::new();
            put_difference(&mut bytes, &base, &field);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(take_difference(&mut rest, &base).map(|differs| differs.unwrap_or(base)), Ok(field));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_a_table_or_an_error(mut bytes: Vec<u8>, place: usize, with: u8) {
            let _ = decode(&bytes, 3);
            let ranks: Vec<RankInfo> = (0..3).map(|rank| real(rank, 3)).collect();
            bytes = encode(&ranks).expect("short enough");
            let place = place % bytes.len();
            bytes[place] = with;
            if let Ok(ranks) = decode(&bytes, 3) {
                prop_assert_eq!(ranks.len(), 3);
            }
        }
    }
}
