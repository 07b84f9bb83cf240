//! Which source file uses which: every path in a file's code that leads to another file of the crate. Tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{relative, rust_files};

/// The files of one crate, and what each uses.
pub(super) struct Imports {
    uses: BTreeMap<String, BTreeSet<String>>,
}

/// A file as a module.
struct Source {
    name: String,
    /// Its path in the crate; empty for the root.
    module: Vec<String>,
    code: String,
}

impl Imports {
    /// Of the crate whose root is `lib.rs` in `folder`.
    pub(super) fn of(folder: &str) -> Imports {
        let sources = sources(folder);
        let files = sources.iter().map(|source| (source.module.clone(), source.name.clone())).collect();
        let uses = sources.iter().map(|source| (source.name.clone(), used_by(source, &files))).collect();
        Imports { uses }
    }

    /// The files that `file` uses.
    pub(super) fn of_file(&self, file: &str) -> impl Iterator<Item = &str> {
        self.uses.get(file).into_iter().flatten().map(String::as_str)
    }

    /// The files that use each other, over others or at once: each set is one circle, or several that meet.
    pub(super) fn circles(&self) -> Vec<BTreeSet<&str>> {
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            self.uses.keys().map(|file| (file.as_str(), self.reached_from(file))).collect();
        let circle = |file: &&str| -> BTreeSet<&str> {
            reached[*file].iter().copied().filter(|other| reached[other].contains(*file)).collect()
        };
        let circles: BTreeSet<BTreeSet<&str>> = reached.keys().map(circle).filter(|circle| circle.len() > 1).collect();
        circles.into_iter().collect()
    }

    /// All that `file` uses, and what that uses.
    fn reached_from(&self, file: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut left: Vec<&str> = self.of_file(file).collect();
        while let Some(next) = left.pop() {
            if reached.insert(next) {
                left.extend(self.of_file(next));
            }
        }
        reached
    }
}

/// The sources of a crate. Files that only its tests have are left out.
fn sources(folder: &str) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut tests: Vec<PathBuf> = vec![root.join("tests"), root.join("examples")];
    let mut sources = Vec::new();
    for path in rust_files(folder) {
        let text = fs::read_to_string(&path).expect("a source file");
        let place = path.strip_prefix(&root).expect("inside the folder").with_extension("");
        let mut module: Vec<String> = place.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
            module.pop();
        }
        let (code, test_modules) = without_tests(&text);
        let home = module.iter().fold(root.clone(), |home, part| home.join(part));
        tests.extend(test_modules.iter().flat_map(|name| [home.join(name), home.join(format!("{name}.rs"))]));
        sources.push((path.clone(), Source { name: relative(&path), module, code }));
    }
    sources.retain(|(path, _)| !tests.iter().any(|test| path.starts_with(test)));
    sources.into_iter().map(|(_, source)| source).collect()
}

/// The code without comments and tests, and the names of the modules that only tests have.
fn without_tests(text: &str) -> (String, Vec<String>) {
    let (mut code, mut modules) = (String::new(), Vec::new());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let line = line.split("//").next().unwrap_or_default();
        if line.trim() != "#[cfg(test)]" {
            code += line;
            code.push('\n');
            continue;
        }
        // The item that the attribute stands on: up to its semicolon, or to the brace at its own indentation.
        let indent = line.len() - line.trim_start().len();
        let Some(item) = lines.by_ref().find(|line| !line.trim_start().starts_with("#[")) else { break };
        if let Some(name) = item.split("mod ").nth(1).and_then(|rest| rest.strip_suffix(';')) {
            modules.push(name.to_owned());
        } else if !item.trim_end().ends_with(';') && !item.trim_end().ends_with('}') {
            let end = format!("{}}}", " ".repeat(indent));
            lines.by_ref().find(|line| line.trim_end() == end);
        }
    }
    (code, modules)
}

fn used_by(source: &Source, files: &BTreeMap<Vec<String>, String>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    for (at, _) in source.code.match_indices("::") {
        let before = &source.code[..at];
        let start = before.rfind(|letter| !is_word(letter)).map_or(0, |end| end + 1);
        let first = &before[start..];
        let is_inside = before[..start].ends_with("::") || before[..start].ends_with('$');
        let mut module = match first {
            _ if is_inside => continue,
            "crate" => Vec::new(),
            "self" => source.module.clone(),
            "super" => source.module.split_last().map(|(_, parent)| parent.to_vec()).unwrap_or_default(),
            // A child, by its name alone.
            child => {
                let path = [source.module.as_slice(), &[child.to_owned()]].concat();
                if !files.contains_key(&path) {
                    continue;
                }
                path
            }
        };
        let mut rest = &source.code[at + 2..];
        while let Some(further) = rest.strip_prefix("super::") {
            module.pop();
            rest = further;
        }
        for names in paths(rest) {
            let mut path = module.clone();
            path.extend(names);
            while !files.contains_key(&path) {
                path.pop();
            }
            found.insert(files[&path].clone());
        }
    }
    found.remove(&source.name);
    found
}

/// The paths at the head of `text`, each as its names: several where braces hold some.
fn paths(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    if let Some(inside) = text.strip_prefix('{') {
        return parts(inside).into_iter().flat_map(paths).collect();
    }
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(text.len());
    let name = text[..end].to_owned();
    match text[end..].strip_prefix("::") {
        Some(rest) => paths(rest).into_iter().map(|path| [vec![name.clone()], path].concat()).collect(),
        None => vec![vec![name]],
    }
}

/// What commas divide, up to the brace that closes.
fn parts(inside: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, letter) in inside.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => {
                parts.push(inside[start..at].trim());
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(inside[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

#[test]
fn uses_are_found_in_all_their_forms() {
    let names = |text| paths(text).iter().map(|path| path.join("::")).collect::<Vec<_>>();
    assert_eq!(names("a::b;"), ["a::b"]);
    assert_eq!(names("a::{self, b::{C, d}, e};"), ["a::self", "a::b::C", "a::b::d", "a::e"]);
    let text = "use a;\n#[cfg(test)]\nmod tests {\n    use b;\n}\nuse c; // d\n#[cfg(test)]\nmod more;\n";
    let (code, modules) = without_tests(text);
    assert_eq!((code.as_str(), modules), ("use a;\nuse c; \n", vec!["more".to_owned()]));
    let module = |path: &str| path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    let files = ["", "a", "a::b", "a::b::c", "d"].map(|path| (module(path), path.to_owned())).into();
    let code =
        "use super::X;\nuse crate::d::{f, g};\nfn h() { c::i(); self::j(); super::super::k(); e::l(); }".to_owned();
    let source = Source { name: "a::b".to_owned(), module: module("a::b"), code };
    assert_eq!(used_by(&source, &files).into_iter().collect::<Vec<_>>(), ["", "a", "a::b::c", "d"]);
    let uses = [("a", vec!["b"]), ("b", vec!["c"]), ("c", vec!["b", "d"]), ("d", vec![])];
    let uses = uses.map(|(file, used)| (file.to_owned(), used.into_iter().map(str::to_owned).collect())).into();
    assert_eq!(Imports { uses }.circles(), [BTreeSet::from(["b", "c"])]);
}
