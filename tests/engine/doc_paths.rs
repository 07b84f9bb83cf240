//! Files that the documents name exist, so that a reader finds them after every rename.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders that the documents leave out of a path.
const ROOTS: &[&str] = &[
    "",
    "backend_api/src",
    "docs",
    "examples",
    "examples/strategies",
    "src",
    "src/comm/failure_detector",
    "torch_plugin",
    "torch_plugin/python/ncclx_rs",
];

/// Names files of other projects.
const OF_OTHERS: &str = "programs.md";

const EXTENSIONS: &[&str] = &["rs", "py", "cpp", "h", "md", "json", "toml"];

fn documents(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for folder in [root.to_path_buf(), root.join("docs")] {
        let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        found.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    assert!(found.len() > 10, "{found:?}");
    found
}

/// What stands in backticks on one line, or behind a link, and looks like a path of a source file.
fn paths(text: &str) -> Vec<&str> {
    let quoted = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let linked = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let is_path = |word: &&str| {
        let is_plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
        is_plain && Path::new(word).extension().is_some_and(|found| EXTENSIONS.iter().any(|known| found == *known))
    };
    quoted.chain(linked).filter(is_path).collect()
}

#[test]
fn the_documents_name_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut missing = vec![];
    let mut checked = 0;
    for document in documents(root) {
        if document.ends_with("CHANGELOG.md") || document.ends_with(OF_OTHERS) {
            continue;
        }
        let text = fs::read_to_string(&document).expect("a document");
        for path in paths(&text) {
            checked += 1;
            if !ROOTS.iter().any(|folder| root.join(folder).join(path).exists()) {
                missing.push(format!("{}: {path}", document.display()));
            }
        }
    }
    assert!(checked > 100, "only {checked} paths were found");
    assert!(missing.is_empty(), "no such files:\n{}", missing.join("\n"));
}
