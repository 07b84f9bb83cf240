//! NVRTC takes the kernels' source for every generation of devices, and what it makes is kept. It needs no GPU.

mod folders;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ncclx_rs::device::kernels::cache::{Cache, Key};
use ncclx_rs::device::kernels::compile::{CompileError, Compiler};
use ncclx_rs::device::kernels::{Computation, Module};
use ncclx_rs::{DType, ReduceOp};

use crate::lacking::lacks;
use folders::folders;

const ARCHITECTURES: [u32; 4] = [80, 90, 100, 120];
/// What differs most, for generations other than the first: compiling takes seconds.
const VARIED: [DType; 4] = [DType::Bool, DType::I64, DType::F16, DType::F64];
const MODULE: DType = DType::Bool;
const NEWEST: u32 = 13;
const ROOM: u64 = 1 << 30;

/// The compiler, if this machine has one.
fn compiler(cache: Option<Cache>) -> Option<Compiler> {
    match Compiler::load(&folders(), NEWEST, cache) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            lacks(format_args!("a compiler of kernels: {error}"));
            None
        }
    }
}

fn module() -> Module {
    Module::of(MODULE).expect("a module")
}

#[test]
fn every_module_compiles_for_every_generation() {
    let Some(compiler) = compiler(None) else { return };
    for architecture in ARCHITECTURES {
        let is_wanted = |module: &Module| architecture == ARCHITECTURES[0] || VARIED.contains(&module.dtype());
        for module in Module::all().filter(is_wanted) {
            let cubin = compiler.module(module, architecture).unwrap_or_else(|error| panic!("{error}"));
            assert!(cubin.starts_with(b"\x7fELF"), "{} for {architecture} is no code", module.name());
            let op = if module.dtype() == MODULE { ReduceOp::BitOr } else { ReduceOp::Sum };
            let name = Computation::Fold(op).function(module.dtype()).expect("a kernel").name;
            let is_there = cubin.windows(name.len()).any(|bytes| bytes == name.as_bytes());
            assert!(is_there, "{} for {architecture} lacks {name}", module.name());
        }
    }
}

#[test]
fn what_was_compiled_is_not_compiled_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let cached = folder.path().join("below/kernels");
    let Some(compiler) = compiler(Some(Cache::new(cached.clone(), ROOM))) else { return };
    let first = compiler.module(module(), 90).expect("code");
    let entry = compiler.entry(module(), 90).expect("a place");
    assert_eq!(fs::metadata(&cached).expect("a folder").permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(&entry).expect("an entry").permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(&cached).expect("a folder").count(), 1, "nothing else is left there");

    // An entry that is whole is taken as it is: under another's name it shows.
    compiler.module(module(), 80).expect("code");
    let other = compiler.entry(module(), 80).expect("a place");
    assert_ne!(entry, other);
    fs::copy(&other, &entry).expect("copied");
    let taken = compiler.module(module(), 90).expect("code");
    assert_ne!(taken, first);
    assert_eq!(taken, compiler.module(module(), 80).expect("code"));
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(compiler) = compiler(Some(Cache::new(folder.path().to_owned(), ROOM))) else { return };
    let first = compiler.module(module(), 90).expect("code");
    let entry = compiler.entry(module(), 90).expect("a place");
    let whole = fs::read(&entry).expect("an entry");
    let mut flipped = whole.clone();
    *flipped.last_mut().expect("a byte") ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() / 2], &whole[..7], &[]] {
        fs::write(&entry, damaged).expect("written");
        assert!(compiler.module(module(), 90).expect("code") == first);
        assert!(fs::read(&entry).expect("an entry") == whole, "the entry is whole again");
    }
}

#[test]
fn a_folder_that_cannot_be_used_keeps_nobody_from_compiling() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("written");
    let open = folder.path().join("open");
    fs::create_dir(&open).expect("made");
    for unusable in [file.join("kernels"), PathBuf::from("/proc/kernels"), open.clone()] {
        fs::set_permissions(&open, Permissions::from_mode(0o777)).expect("opened to others");
        let Some(compiler) = compiler(Some(Cache::new(unusable, ROOM))) else { return };
        assert!(compiler.module(module(), 90).expect("code").starts_with(b"\x7fELF"));
    }
    assert_eq!(fs::read_dir(&open).expect("a folder").count(), 0, "others could change what is kept there");
}

#[test]
fn a_cache_keeps_to_its_bound_and_clears_away_litter() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::new(folder.path().to_owned(), 300);
    let keys: Vec<Key> = ["one", "two", "three", "four"].map(|text| Key::new([text])).into();
    let hours_ago = |hours: u64| std::time::SystemTime::now() - std::time::Duration::from_secs(3600 * hours);
    let age = |path: &Path, hours: u64| {
        fs::File::open(path).and_then(|file| file.set_modified(hours_ago(hours))).expect("made older");
    };
    let (old, new) = (folder.path().join("old.part"), folder.path().join("new.part"));
    fs::write(&old, "").expect("written");
    fs::write(&new, "").expect("written");
    age(&old, 2);
    for (key, hours) in keys.iter().zip([9, 8, 7]) {
        cache.store(key, &[1; 68]).expect("stored");
        age(&cache.path(key), hours);
    }
    // Being used makes it young.
    assert_eq!(cache.load(&keys[0]).expect("read"), Some(vec![1; 68]));
    cache.store(&keys[3], &[2; 68]).expect("stored");
    let are_there: Vec<bool> = keys.iter().map(|key| cache.path(key).exists()).collect();
    assert_eq!(are_there, [true, false, true, true]);
    assert!(!old.exists() && new.exists(), "what a writer has left, and what it may be writing");
    cache.store(&keys[1], &[3; 1000]).expect("stored");
    assert!(cache.load(&keys[1]).expect("read").is_some(), "what was stored last stays");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
}

#[test]
fn without_a_compiler_there_is_an_error_that_says_how_to_get_one() {
    let error = Compiler::load(&[], 11, None).expect_err("nothing is that old");
    assert!(matches!(error, CompileError::NoCompiler { .. }));
    assert!(error.to_string().contains("pip install nvidia-cuda-nvrtc-cu11"), "{error}");
}

#[test]
fn a_device_that_the_compiler_does_not_know_is_an_error() {
    let Some(compiler) = compiler(None) else { return };
    let error = compiler.module(module(), 20).expect_err("a device of 2010");
    assert!(matches!(error, CompileError::Architecture { architecture: 20, .. }), "{error}");
    assert!(error.to_string().contains("compute capability 2.0"), "{error}");
}
