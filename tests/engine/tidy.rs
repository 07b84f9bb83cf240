//! The rules of the source tree that the compiler does not know.

mod imports;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use imports::Imports;

/// A module uses only modules of its own layer or of layers before it.
const LAYERS: &[&[&str]] = &[
    &["sync", "error", "types", "counts", "config", "deadline", "fuzz_input"],
    &["sys", "buffer"],
    &["link", "op", "topo", "schedule", "window", "work"],
    &["algo", "signature"],
    &["simulate"],
    &["device"],
    &["transport"],
    &["engine"],
    &["comm"],
    &["rdma", "measure"],
    &["fuzz"],
];

/// Modules of one layer that must not see each other although one comes first: they meet in the engine.
const APART: &[(&str, &str)] = &[("transport", "algo")];

/// The floors of a folder, the lowest first: a file uses only files of lower floors, and of its own floor those that
/// [`BESIDE`] lists. Children of a file stand where it stands.
const FLOORS: &[(&str, &[&[&str]])] = &[
    (
        "src/engine/",
        &[
            // Data.
            &[
                "body",
                "call",
                "completion",
                "failures",
                "flight_recorder",
                "frame",
                "heartbeat",
                "per_rank",
                "plan",
                "reduce",
                "region",
                "vain_looks",
                "wait_policy",
            ],
            // Queues.
            &["recv_buffer", "inbox", "outbox"],
            // What is called.
            &["request"],
            &["question"],
            // What has yet to be heard of a call.
            &["owed", "absent_ranks"],
            &["device_waits"],
            // Endpoints.
            &["agenda", "connector", "peers", "endpoint"],
            // The rendezvous of long messages.
            &["copying"],
            &["single_copy", "rndv", "buffered_send", "remote_reads"],
            // Protocols, none of which sees another.
            &["context", "collective", "device_accesses", "device_messages", "message", "relay", "window"],
            // The engine.
            &["progress", "dump", "fast_path", "shutdown"],
            // Threads.
            &["callbacks", "driver"],
            // Tests.
            &["mock_peer", "fuzz"],
        ],
    ),
    (
        "src/comm/",
        &[
            &["address", "check", "data", "framing", "registry"],
            &["store", "summary", "tensors"],
            &["bootstrap"],
            &["island", "wireup", "failure_detector", "other_hosts"],
            &["device"],
            &["communicator"],
            // What a communicator offers, and ways to one.
            &["blocking", "group", "launch", "on_device", "split", "through_host", "window"],
            &["mixed"],
        ],
    ),
    (
        "src/rdma/",
        &[
            &["error"],
            &["memory", "pending"],
            &["protocol", "span"],
            &["wire"],
            &["ucx", "direct"],
            &["client", "server"],
            &["transport"],
            &["fuzz"],
        ],
    ),
    ("src/comm/store/", &[&["interface"], &["memory", "prefix", "protocol"], &["server"], &["tcp"], &["fuzz"]]),
    (
        "src/comm/bootstrap/",
        &[
            &["build", "groups"],
            &["rank_info", "tree"],
            &["protocol"],
            &["context", "roster", "server", "table"],
            &["reply"],
            &["leader", "relay"],
            &["joiner", "root"],
            &["simulated"],
            &["measured"],
            &["fuzz", "tests"],
            &["leader_tests", "joiner_tests"],
        ],
    ),
    (
        "src/comm/failure_detector/",
        &[
            &["neighbours", "notice", "manner"],
            &["envelope", "gossip"],
            &["outgoing"],
            &["incoming"],
            &["links"],
            &["monitor"],
            &["state"],
            &["watch"],
            &["thread"],
            &["tests"],
        ],
    ),
    ("src/simulate/", &[&["time", "error"], &["model", "world"], &["interfaces", "program"], &["run"], &["tests"]]),
    (
        "src/transport/",
        &[&["auth", "runs", "shortage"], &["handshake"], &["pending", "tls"], &["shm", "tcp"], &["ucx"]],
    ),
    ("src/transport/shm/", &[&["bells", "line_ownership"], &["doorbell"], &["handover"], &["ring_stream"], &["tests"]]),
    (
        "src/transport/tcp/",
        &[
            &["failures", "greeting", "lanes", "paths", "rails", "tender"],
            &["channel", "connect", "listener", "member"],
            &["trunk_end", "rail_recv", "reopening"],
            &["inbound", "outbound", "rail_send"],
            &["trunks"],
            &["tests"],
        ],
    ),
    ("src/transport/tcp/lanes/", &[&["piece", "window"], &["reader"], &["tests"]]),
    ("src/transport/tcp/rails/", &[&["link", "piece"], &["receiver", "sender"], &["fuzz", "tests"]]),
    (
        "src/transport/ucx/",
        &[
            &["header", "offer", "ordered", "reads"],
            &["link", "mock_peer"],
            &["hub"],
            &["handover"],
            &["recv_stream", "send_stream"],
            &["fuzz", "tests"],
        ],
    ),
    (
        "src/device/",
        &[
            // Data.
            &["descriptors", "halves", "kernels", "layout", "network", "record", "regions", "segment", "staging"],
            &["allocator"],
            // What is decided.
            &["call_log", "lower", "setup"],
            &["all_to_all", "counters", "plans", "rounds"],
            &["rings", "routes", "tokens", "words"],
            // What acts on streams and on words.
            &["control", "lane", "other_hosts"],
            &["graph_mark", "in_flight", "launch", "marks", "message_log", "ring_lane", "signals"],
            &["far_pairs", "far_windows", "parts", "replay", "timer", "vendor"],
            &["pairs"],
            // What ends it, and what begins it.
            &["watch"],
            &["graph_lane", "graph_library", "graph_waits"],
            &["accesses", "graph", "graph_rings", "recordings"],
            &["landing"],
            &["windows"],
            &["executor", "messages"],
        ],
    ),
];

/// What a file uses of its own floor.
const BESIDE: &[(&str, &[&str])] = &[
    ("src/device/network", &["halves"]),
    ("src/device/other_hosts", &["control"]),
    ("src/engine/body", &["region"]),
    ("src/engine/flight_recorder", &["call"]),
    ("src/engine/plan", &["region"]),
    ("src/engine/inbox", &["recv_buffer"]),
    ("src/engine/peers", &["connector"]),
    ("src/engine/endpoint", &["agenda", "connector", "peers"]),
    ("src/engine/rndv", &["single_copy"]),
    ("src/engine/buffered_send", &["rndv"]),
    ("src/engine/collective", &["context"]),
    ("src/engine/device_accesses", &["context"]),
    ("src/engine/device_messages", &["context"]),
    ("src/engine/message", &["context"]),
    ("src/engine/relay", &["context"]),
    ("src/engine/window", &["context", "remote_reads"]),
    ("src/engine/dump", &["progress"]),
    ("src/engine/fast_path", &["progress"]),
    ("src/engine/shutdown", &["progress"]),
    ("src/engine/driver", &["callbacks"]),
    ("src/engine/fuzz", &["mock_peer"]),
];

/// Where unsafe code may stand.
const UNSAFE: &[&str] = &[
    "backend_api/src/export.rs",
    "backend_api/src/operation.rs",
    "backend_api/src/abi.rs",
    "backend_api/src/store.rs",
    "backend_api/src/tensor.rs",
    "backend_api/tests/boundary.rs",
    "examples/all_reduce_cuda.rs",
    "examples/one_sided/mod.rs",
    "examples/quantized_backend/src/bridge.rs",
    "src/buffer.rs",
    "src/comm/blocking.rs",
    "src/comm/data.rs",
    "src/comm/through_host.rs",
    "src/comm/tensors.rs",
    "src/device/kernels/load.rs",
    "src/engine/region.rs",
    "src/sys/",
    "torch_plugin/src/abi.rs",
    "torch_plugin/src/abi/",
    "torch_plugin/src/allocator.rs",
    "torch_plugin/src/library/instance.rs",
    "torch_plugin/src/library/load.rs",
    "torch_plugin/src/library/store.rs",
    "torch_plugin/src/rdma.rs",
    "torch_plugin/src/shim.rs",
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
                let is_apart = APART.contains(&(module, used.as_str()));
                assert!(theirs <= own && !is_apart, "{name}:{}: `{module}` uses `{used}`", number + 1);
            }
        }
    }
}

/// The floor of a file of `folder`, and its name there.
fn floor<'a>(folder: &str, floors: &[&[&str]], file: &'a str) -> Option<(usize, &'a str)> {
    let name = file.strip_prefix(folder)?.trim_end_matches(".rs").split('/').next()?;
    if name == "mod" {
        return None;
    }
    let floor = floors.iter().position(|floor| floor.contains(&name));
    Some((floor.unwrap_or_else(|| panic!("{file} has no floor")), name))
}

#[test]
fn files_use_only_what_stands_below_them() {
    let imports = Imports::of("src");
    for (folder, floors) in FLOORS {
        for path in rust_files(folder) {
            let file = relative(&path);
            let Some((own, name)) = floor(folder, floors, &file) else { continue };
            let beside = BESIDE.iter().find(|(from, _)| *from == format!("{folder}{name}"));
            let beside = beside.map_or(&[][..], |(_, beside)| beside);
            for (theirs, used) in imports.of_file(&file).filter_map(|used| floor(folder, floors, used)) {
                let is_beside = theirs == own && (used == name || beside.contains(&used));
                assert!(theirs < own || is_beside, "{file} uses {used}, which does not stand below it");
            }
        }
    }
}

/// The types that `code` defines, or gives methods to.
fn types<'a>(code: &'a str, keywords: &[&str]) -> Vec<&'a str> {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let of_line = |line: &'a str| {
        let words = line.trim_start_matches("pub ").trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
        let rest = keywords.iter().find_map(|keyword| words.strip_prefix(keyword))?;
        let rest = rest.rsplit(" for ").next()?.trim_start_matches(|letter| letter != '<' && !is_word(letter));
        let rest = if rest.starts_with('<') { rest.split_once('>')?.1.trim_start() } else { rest };
        rest.split(|letter| !is_word(letter)).next().filter(|name| !name.is_empty())
    };
    code.lines().filter_map(of_line).collect()
}

#[test]
fn files_give_methods_only_to_types_of_their_own_floor_or_below() {
    for (folder, floors) in FLOORS {
        let mut owners = BTreeMap::new();
        let mut files = Vec::new();
        for path in rust_files(folder) {
            let (file, text) = (relative(&path), fs::read_to_string(&path).expect("a source file"));
            let Some((own, _)) = floor(folder, floors, &file) else { continue };
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned();
            for name in types(&code, &["struct ", "enum "]) {
                let highest = owners.entry(name.to_owned()).or_insert(own);
                *highest = own.min(*highest);
            }
            if !file.ends_with("/tests.rs") {
                files.push((file, own, code));
            }
        }
        for (file, own, code) in files {
            for name in types(&code, &["impl ", "impl"]) {
                let above = owners.get(name).is_some_and(|owner| *owner > own);
                assert!(!above, "{file} has methods of `{name}`, which stands above it");
            }
            let engines = code.matches("\nimpl Engine {").count();
            let expected =
                usize::from(code.contains("use crate::engine::progress::Engine;") || file.ends_with("/progress.rs"));
            assert!(engines <= expected, "{file} has {engines} blocks of methods of the engine");
        }
    }
}

#[test]
fn no_files_use_each_other() {
    let crates = ["src", "torch_plugin/src", "device_mesh/src", "backend_api/src"].map(Imports::of);
    let circles: Vec<_> = crates.iter().flat_map(Imports::circles).collect();
    assert!(circles.is_empty(), "these files use each other: {circles:#?}");
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

/// The names and numbers of an enumeration in a source, in lower case and without `prefix`.
fn numbers(file: &str, head: &str, prefix: &str) -> Vec<(String, u32)> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("a source file");
    let (_, rest) = text.split_once(head).unwrap_or_else(|| panic!("{file} has no `{head}`"));
    let (body, _) = rest.split_once('}').expect("the enumeration's end");
    let lines = body.lines().filter_map(|line| line.split("//").next()?.trim().trim_end_matches(',').split_once(" = "));
    lines.map(|(name, n)| (name.trim_start_matches(prefix).to_lowercase(), n.parse().expect("a number"))).collect()
}

#[test]
fn statuses_have_the_same_numbers_in_rust_and_in_cpp() {
    let rust = numbers("torch_plugin/src/convert.rs", "enum Status {", "");
    let cpp = numbers("torch_plugin/csrc/ncclx_abi.h", "enum NcclxStatus : int32_t {", "NCCLX_");
    assert!(rust.len() > 5 && rust == cpp, "{rust:?} is not {cpp:?}");
}
