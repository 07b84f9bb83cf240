//! Tells the engine what it is built from, so that ranks whose formats or plans may differ do not join.
//!
//! Nearly every source file has a part in what ranks say to each other or in which steps they take, so all of them count:
//! nobody has to remember to raise a number.

#![allow(clippy::print_stdout, reason = "so a build script speaks to cargo")]

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rustc-env=SOURCES_FINGERPRINT={}", fingerprint(&sources(Path::new("src"))?));
    Ok(())
}

/// The text of every source file in a folder, by its path there.
pub(crate) fn sources(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![(folder.to_path_buf(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), format!("{prefix}{}", entry.file_name().to_string_lossy()));
            if path.is_dir() {
                folders.push((path, name + "/"));
            } else if [".rs", ".cu"].iter().any(|ending| name.ends_with(ending)) {
                found.insert(name, fs::read_to_string(path)?);
            }
        }
    }
    Ok(found)
}

/// A number for these files that others are unlikely to have, whichever way a checkout ends their lines. The same on
/// every machine and with every compiler: FNV-1a, <http://www.isthe.com/chongo/tech/comp/fnv/>.
pub(crate) fn fingerprint(sources: &BTreeMap<String, String>) -> String {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    // No text has the byte that stands behind each.
    let mut add = |text: &str| {
        for byte in text.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    for (name, text) in sources {
        add(name);
        add(&text.lines().count().to_string());
        text.lines().for_each(&mut add);
    }
    format!("{hash:016x}")
}
