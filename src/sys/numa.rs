//! NUMA nodes: the CPUs and the memory that belong together, and where pages are taken from (mbind(2)).
#![allow(unsafe_code, reason = "mbind is not in rustix")]

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags};
use serde::Serialize;

use crate::config::NumaNode;
use crate::sys::process;

/// The nodes of a host, as the kernel tells them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes(Vec<Node>);

/// A node that is online.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// The first and the last number of each run of its CPUs that are online; none where it has memory alone.
    pub cpus: Vec<(u32, u32)>,
    /// How far the nodes are from it, in their order; 10 is its own memory.
    pub distances: Vec<u32>,
}

impl Nodes {
    /// Those of this host.
    pub fn of_host() -> Nodes {
        Nodes::read(Path::new("/sys"))
    }

    /// Those below the folder `sys`, which is `/sys` outside tests. A kernel without NUMA has none.
    pub fn read(sys: &Path) -> Nodes {
        let folder = sys.join("devices/system/node");
        let text = |path: &str| fs::read_to_string(folder.join(path)).unwrap_or_default();
        let node = |number| Node {
            number,
            cpus: runs(&text(&format!("node{number}/cpulist"))).unwrap_or_default(),
            distances: numbers(&text(&format!("node{number}/distance"))).unwrap_or_default(),
        };
        let online = runs(&text("online")).unwrap_or_default();
        Nodes(online.into_iter().flat_map(|(first, last)| first..=last).map(node).collect())
    }

    /// The nodes, by number.
    pub fn iter(&self) -> impl Iterator<Item = &Node> {
        self.0.iter()
    }

    /// The node that all of `cpus` belong to. None where one node has all CPUs, so that there is nothing to choose, where they
    /// belong to several, and where the kernel does not tell.
    pub fn node_of(&self, cpus: &[u32]) -> Option<u32> {
        let with_cpus = || self.0.iter().filter(|node| !node.cpus.is_empty());
        let first = cpus.first()?;
        let node = with_cpus().find(|node| node.has(*first))?;
        (with_cpus().count() > 1 && cpus.iter().all(|cpu| node.has(*cpu))).then_some(node.number)
    }
}

impl Node {
    fn has(&self, cpu: u32) -> bool {
        self.cpus.iter().any(|(first, last)| (*first..=*last).contains(&cpu))
    }
}

/// The runs in a list such as `0-3,8`; None if that is no list.
fn runs(text: &str) -> Option<Vec<(u32, u32)>> {
    let run = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last < NUMBERS_MAX).then_some((first, last))
    };
    text.trim().split(',').filter(|part| !part.is_empty()).map(run).collect()
}

/// The numbers in a line; None if there is something else.
fn numbers(text: &str) -> Option<Vec<u32>> {
    text.split_whitespace().map(|word| word.parse().ok()).collect()
}

/// What `choice` comes to for the CPUs that this thread may run on: a node, or off.
pub fn settled(choice: NumaNode) -> NumaNode {
    match choice {
        NumaNode::Auto => Nodes::of_host().node_of(&process::own_cpus().0).map_or(NumaNode::Off, NumaNode::Exactly),
        settled => settled,
    }
}

/// The node that a rank is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Home {
    /// Its number.
    pub node: u32,
    /// Why the system does not let this process have memory there, if it does not: where it lies then is as the system likes.
    pub refused: Option<String>,
}

impl Home {
    /// The node with this number, after asking the system for memory there.
    pub fn at(node: u32) -> Home {
        Home { node, refused: may_prefer(node).err().map(|error| error.to_string()) }
    }
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.refused {
            None => write!(f, "on NUMA node {}", self.node),
            Some(cause) => write!(f, "wherever the system likes and not on NUMA node {}: {cause}", self.node),
        }
    }
}

/// Whether the system lets this process choose the node of its pages. The error says why not: containers may forbid it, and a
/// node may have no memory, or none that this process may use.
fn may_prefer(node: u32) -> io::Result<()> {
    let len = rustix::param::page_size();
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces nothing.
    let page = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) }?;
    let preferred = prefer(page.cast(), len, node);
    // SAFETY: the page was just mapped, and nothing refers to it.
    let _ = unsafe { rustix::mm::munmap(page, len) };
    preferred
}

/// Has the pages of the `len` bytes from `base` on, which begin a page, taken from `node` as long as it has some. Of a mapped
/// file, that holds for all processes that map it. Pages that there are already stay where they are.
pub(super) fn prefer(base: *mut u8, len: usize, node: u32) -> io::Result<()> {
    let mut mask = [0 as libc::c_ulong; MASK_WORDS];
    let bits = libc::c_ulong::BITS;
    let word = mask.get_mut((node / bits) as usize).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node % bits);
    // The kernel takes one bit less than it is told.
    let (mask, bits) = (mask.as_ptr(), MASK_WORDS * bits as usize + 1);
    // SAFETY: the call reads the mask, which has so many bits but one, and changes nothing in memory. An address that is not
    // mapped is an error.
    match unsafe { libc::syscall(libc::SYS_mbind, base, len, libc::MPOL_PREFERRED, mask, bits, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// CPUs and nodes have numbers below this one: more than any kernel is built for.
const NUMBERS_MAX: u32 = 1 << 16;

/// The words of a set of nodes: the most that any kernel is built for are 1024.
const MASK_WORDS: usize = (NumaNode::MAX as usize + 1) / libc::c_ulong::BITS as usize;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A node that this process may have memory on; none, with a word about it, where it may choose none.
    pub(crate) fn usable_node() -> Option<u32> {
        let node = Nodes::of_host().iter().map(|node| node.number).find(|node| may_prefer(*node).is_ok());
        if node.is_none() {
            assert!(std::env::var("NCCLX_RS_CI").is_err(), "CI lacks what the test needs: mbind");
            eprintln!("skipped: it takes mbind");
        }
        node
    }

    /// From where the kernel takes the pages of this process's mappings of `len` bytes of files without a name.
    pub(crate) fn policies(len: usize) -> Vec<String> {
        let read = |file| fs::read_to_string(format!("/proc/self/{file}")).expect("what is mapped");
        let has_length = |line: &str| {
            let (first, last) = line.split_whitespace().next()?.split_once('-')?;
            let number = |text| usize::from_str_radix(text, 16).ok();
            (number(last)? - number(first)? == len).then(|| first.to_owned())
        };
        let starts: Vec<String> = read("maps").lines().filter_map(has_length).collect();
        let of_file = |line: &str| {
            let (start, rest) = line.split_once(' ')?;
            let (policy, rest) = rest.split_once(' ')?;
            (starts.iter().any(|other| other == start) && rest.contains("memfd:ncclx_rs")).then(|| policy.to_owned())
        };
        read("numa_maps").lines().filter_map(of_file).collect()
    }

    /// The nodes below a folder with these files of `devices/system/node`.
    fn nodes(files: &[(&str, &str)]) -> Nodes {
        let sys = tempfile::tempdir().expect("a folder");
        for (file, text) in files {
            let path = sys.path().join("devices/system/node").join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("the file's folder");
            fs::write(path, text).expect("the file");
        }
        Nodes::read(sys.path())
    }

    fn range(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    #[test]
    fn on_two_nodes_a_rank_has_the_one_of_all_its_cpus() {
        let two = nodes(&[
            ("online", "0-1\n"),
            ("node0/cpulist", "0-3,8-11\n"),
            ("node0/distance", "10 21\n"),
            ("node1/cpulist", "4-7,12-15\n"),
            ("node1/distance", "21 10\n"),
        ]);
        assert_eq!(two.node_of(&[0, 3, 8, 11]), Some(0));
        assert_eq!(two.node_of(&[12]), Some(1));
        assert_eq!(two.node_of(&range(4..8)), Some(1));
        assert_eq!(two.node_of(&range(3..5)), None, "on both");
        assert_eq!(two.node_of(&range(0..16)), None, "not bound");
        assert_eq!(two.node_of(&[0, 16]), None, "one that is of no node");
        assert_eq!((two.node_of(&[16]), two.node_of(&[])), (None, None));
        let distances: Vec<&[u32]> = two.iter().map(|node| &node.distances[..]).collect();
        assert_eq!(distances, [[10, 21], [21, 10]]);
    }

    #[test]
    fn where_one_node_has_all_cpus_there_is_nothing_to_choose() {
        let one = [("online", "0\n"), ("node0/cpulist", "0-7\n"), ("node0/distance", "10\n")];
        assert_eq!(nodes(&one).node_of(&[2]), None);
        let memory_alone = [("online", "0-1\n"), ("node0/cpulist", "0-7\n"), ("node1/cpulist", "\n")];
        let found = nodes(&memory_alone);
        assert_eq!(found.node_of(&[2]), None, "the other one has memory alone");
        assert_eq!(found.iter().map(|node| (node.number, node.cpus.len())).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
    }

    #[test]
    fn nodes_and_cpus_that_are_offline_are_left_out() {
        // The kernel's lists name what is online: node 1 is not, and CPUs 2 and 3 are not.
        let some = nodes(&[
            ("online", "0,2-3\n"),
            ("possible", "0-3\n"),
            ("node0/cpulist", "0-1\n"),
            ("node1/cpulist", "4-7\n"),
            ("node2/cpulist", "8-11\n"),
            ("node3/cpulist", "\n"),
        ]);
        assert_eq!([&[0, 1][..], &[8], &[4], &[1, 2]].map(|cpus| some.node_of(cpus)), [Some(0), Some(2), None, None]);
    }

    #[test]
    fn what_the_kernel_does_not_tell_is_no_node() {
        assert_eq!(nodes(&[]), Nodes::default());
        assert_eq!(nodes(&[]).node_of(&[0]), None);
        let lacking = nodes(&[("online", "0-2\n"), ("node0/cpulist", "0-1\n"), ("node1/cpulist", "2-3\n")]);
        assert_eq!((lacking.node_of(&[3]), lacking.node_of(&[4])), (Some(1), None));
        for wrong in ["two", "1-0", "0-", "-1", "0-4294967295", "0-1;3"] {
            assert_eq!(nodes(&[("online", wrong), ("node0/cpulist", "0")]), Nodes::default(), "{wrong}");
        }
        assert_eq!(runs("0-1,,4,\n"), Some(vec![(0, 1), (4, 4)]));
    }

    #[test]
    fn a_setting_is_taken_as_it_is() {
        assert_eq!(settled(NumaNode::Exactly(7)), NumaNode::Exactly(7));
        assert_eq!(settled(NumaNode::Off), NumaNode::Off);
        assert_ne!(settled(NumaNode::Auto), NumaNode::Auto);
    }

    #[test]
    fn a_node_that_is_not_there_is_refused() {
        let beyond = Nodes::of_host().iter().map(|node| node.number + 1).max().unwrap_or_default();
        for node in [beyond, NumaNode::MAX, NumaNode::MAX + 1, u32::MAX] {
            let home = Home::at(node);
            assert!(home.refused.is_some() && home.to_string().contains("and not on NUMA node "), "{home}");
        }
    }

    #[test]
    fn a_node_that_is_there_is_a_home() {
        if let Some(node) = usable_node() {
            let home = Home::at(node);
            assert_eq!((home.to_string(), home.refused), (format!("on NUMA node {node}"), None));
        }
    }
}
