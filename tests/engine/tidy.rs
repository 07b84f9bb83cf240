//! The rules of the source tree that the compiler does not know.

use std::fs;
use std::path::{Path, PathBuf};

/// A module uses only modules of its own layer or of layers before it.
const LAYERS: &[&[&str]] = &[
    &["sync", "error", "types", "counts", "config", "deadline", "fuzz_input"],
    &["sys", "buffer"],
    &["op", "topo", "schedule", "window", "work"],
    &["algo", "signature"],
    &["device"],
    &["transport"],
    &["engine"],
    &["comm"],
    &["fuzz"],
];

/// Modules of one layer that must not see each other although one comes first: they meet in the engine.
const STRANGERS: &[(&str, &str)] = &[("transport", "algo")];

/// Where unsafe code may stand.
const UNSAFE: &[&str] = &[
    "backend_api/src/export.rs",
    "backend_api/src/operation.rs",
    "backend_api/src/abi.rs",
    "backend_api/src/store.rs",
    "backend_api/src/tensor.rs",
    "backend_api/tests/boundary.rs",
    "examples/quantized_backend/src/bridge.rs",
    "src/buffer.rs",
    "src/comm/blocking.rs",
    "src/comm/data.rs",
    "src/comm/tensors.rs",
    "src/engine/region.rs",
    "src/sys/",
    "torch_plugin/src/abi.rs",
    "torch_plugin/src/library/instance.rs",
    "torch_plugin/src/library/load.rs",
    "torch_plugin/src/library/store.rs",
    "torch_plugin/src/python.rs",
];

/// The folders of the workspace's sources.
const SOURCES: &[&str] = &["src", "torch_plugin/src", "device_mesh/src", "backend_api", "examples"];

const MAX_LINES: usize = 800;

fn rust_files(folder: &str) -> Vec<PathBuf> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a source folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found);
    assert!(!found.is_empty(), "no sources in {folder}");
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(env!("CARGO_MANIFEST_DIR")).expect("inside the repository").display().to_string()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

#[test]
fn modules_use_only_what_stands_below_them() {
    for path in rust_files("src") {
        let name = relative(&path);
        let module = name.trim_start_matches("src/").trim_end_matches(".rs").split('/').next().expect("a name");
        if module == "lib" {
            continue;
        }
        let own = layer(module).unwrap_or_else(|| panic!("{name}: module `{module}` has no layer"));
        let text = fs::read_to_string(&path).expect("a source file");
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            for used in line.split("crate::").skip(1) {
                let used: String = used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let Some(theirs) = layer(&used) else { continue };
                let stranger = STRANGERS.contains(&(module, used.as_str()));
                assert!(theirs <= own && !stranger, "{name}:{}: `{module}` uses `{used}`", number + 1);
            }
        }
    }
}

#[test]
fn unsafe_code_stays_behind_the_fence() {
    for folder in SOURCES {
        for path in rust_files(folder) {
            let name = relative(&path);
            let text = fs::read_to_string(&path).expect("a source file");
            let uses = text.lines().any(|line| {
                let code = line.split("//").next().unwrap_or_default();
                code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl")
            });
            assert!(!uses || UNSAFE.iter().any(|allowed| name.starts_with(allowed)), "{name} has unsafe code");
        }
    }
}

#[test]
fn files_do_one_thing() {
    for folder in SOURCES.iter().chain(&["tests"]) {
        for path in rust_files(folder) {
            let lines = fs::read_to_string(&path).expect("a source file").lines().count();
            assert!(lines <= MAX_LINES, "{} has {lines} lines, more than {MAX_LINES}", relative(&path));
        }
    }
}
