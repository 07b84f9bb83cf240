//! Compiles csrc/ into the shim, a shared library for one PyTorch and one Python that the extension loads at import.
//!
//! It is made for the PyTorch that is installed for the interpreter that will import the extension. A wheel for many has one
//! for each line of the file that `NCCLX_RS_SHIMS` names.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::{env, fs, thread};

const OLDEST: (u32, u32) = (2, 11);
const NEWEST: (u32, u32) = (2, 15);

/// Set where nothing is linked, as in lints: csrc/ takes a minute to compile.
const CHECK_ONLY: &str = "NCCLX_RS_CHECK_ONLY";

/// Names a file with a line for each shim, as `PROBE` prints it.
const SHIMS: &str = "NCCLX_RS_SHIMS";

/// The fields of a target, with tabs between them. The third is the same in `ncclx_rs._load`.
const PROBE: &str = "
import os, sys, sysconfig, torch
print(
    torch.__version__,
    os.path.join(os.path.dirname(torch.__file__), 'include'),
    f'cpython{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}',
    sysconfig.get_paths()['include'],
    int(torch.compiled_with_cxx11_abi()),
    sep='\\t',
)
";

/// What the shim is linked to. PyTorch has loaded them when the shim is loaded.
const LIBRARIES: [&str; 3] = ["c10", "torch_cpu", "torch_python"];

type Result<T> = std::result::Result<T, String>;

fn main() -> ExitCode {
    for name in ["NCCLX_RS_PYTHON", "PYO3_PYTHON", "VIRTUAL_ENV", CHECK_ONLY, SHIMS] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=csrc");
    match targets().and_then(|targets| build(&targets)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            // Cargo shows what a failed build script wrote there.
            #[allow(clippy::print_stderr, reason = "a build script's way to say what is wrong")]
            {
                eprintln!("ncclx_rs: {message}");
            }
            ExitCode::FAILURE
        }
    }
}

/// A PyTorch and a Python.
struct Target {
    minor: (u32, u32),
    torch_include: PathBuf,
    python: String,
    python_includes: Vec<PathBuf>,
    cxx11_abi: String,
}

impl Target {
    fn parse(line: &str) -> Result<Self> {
        let fields: Vec<&str> = line.trim_end().split('\t').collect();
        let [version, torch_include, python, python_includes, cxx11_abi] = fields[..] else {
            return Err(format!(
                "expected five fields of a PyTorch and its Python with tabs between them, got {line:?}"
            ));
        };
        let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
        let minor = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if minor < OLDEST || minor > NEWEST {
            return Err(format!(
                "PyTorch {version} is not supported, {}.{} to {}.{} are; type `pip install 'torch>={}.{},<{}.{}'`",
                OLDEST.0,
                OLDEST.1,
                NEWEST.0,
                NEWEST.1,
                OLDEST.0,
                OLDEST.1,
                NEWEST.0,
                NEWEST.1 + 1
            ));
        }
        Ok(Self {
            minor,
            torch_include: torch_include.into(),
            python: python.into(),
            python_includes: python_includes.split(':').map(PathBuf::from).collect(),
            cxx11_abi: cxx11_abi.into(),
        })
    }

    /// The name by which `ncclx_rs._load` looks for it.
    fn file_name(&self) -> String {
        format!("torch{}.{}-{}.so", self.minor.0, self.minor.1, self.python)
    }
}

fn targets() -> Result<Vec<Target>> {
    let Some(list) = env::var_os(SHIMS).map(PathBuf::from) else { return Ok(vec![installed()?]) };
    println!("cargo:rerun-if-changed={}", list.display());
    let text = fs::read_to_string(&list).map_err(|error| format!("{SHIMS}: {}: {error}", list.display()))?;
    let targets: Vec<Target> = text.lines().map(Target::parse).collect::<Result<_>>()?;
    if targets.is_empty() { Err(format!("{SHIMS}: {} has no line", list.display())) } else { Ok(targets) }
}

fn python() -> PathBuf {
    let named = env::var_os("NCCLX_RS_PYTHON").or_else(|| env::var_os("PYO3_PYTHON")).map(PathBuf::from);
    let in_venv = || env::var_os("VIRTUAL_ENV").map(|venv| PathBuf::from(venv).join("bin/python"));
    named.or_else(in_venv).unwrap_or_else(|| "python3".into())
}

fn installed() -> Result<Target> {
    let python = python();
    // Without autoload: an older build of this backend must not stand in the way of its own replacement.
    let output = Command::new(&python).args(["-c", PROBE]).env("TORCH_DEVICE_BACKEND_AUTOLOAD", "0").output();
    let output = output.map_err(|error| format!("{} does not run: {error}", python.display()))?;
    if !output.status.success() {
        return Err(format!(
            "no PyTorch for {}; type `pip install torch maturin` and then `pip install --no-build-isolation .`",
            python.display()
        ));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let target = Target::parse(text.lines().last().unwrap_or_default())?;
    println!("cargo:rerun-if-changed={}", target.torch_include.join("torch/headeronly/version.h").display());
    Ok(target)
}

/// Puts the shims into `shims` of the folder for outputs, where maturin finds them.
fn build(targets: &[Target]) -> Result<()> {
    if env::var_os(CHECK_ONLY).is_some() {
        return Ok(());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let (shims, stubs) = (out.join("shims"), out.join("stubs"));
    for folder in [&shims, &stubs] {
        // Also those of another list.
        let _ = fs::remove_dir_all(folder);
        fs::create_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    for library in LIBRARIES {
        stub(library, &stubs)?;
    }
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1_usize);
    let waiting = Mutex::new(targets.iter());
    let work = || -> Result<()> {
        while let Some(target) = waiting.lock().map_or(None, |mut waiting| waiting.next()) {
            compile(target, &stubs, &shims.join(target.file_name()))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.min(targets.len())).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a thread panicked".to_owned())?)
    })
}

/// A library in the place of PyTorch's, whose name is all that the linker takes from it. So a build needs only headers.
fn stub(library: &str, stubs: &Path) -> Result<()> {
    let file = format!("lib{library}.so");
    let mut command = cc::Build::new().try_get_compiler().map_err(|error| error.to_string())?.to_command();
    command.args(["-shared", "-nostdlib", "-x", "c", "/dev/null"]).arg(format!("-Wl,-soname,{file}"));
    run(command.arg("-o").arg(stubs.join(file)))
}

fn compile(target: &Target, stubs: &Path, file: &Path) -> Result<()> {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .opt_level(2)
        .debug(false)
        .flag("-fvisibility=hidden")
        .flag("-fvisibility-inlines-hidden")
        .flag("-isystem")
        .flag(&target.torch_include)
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Wno-unused-parameter")
        .define("_GLIBCXX_USE_CXX11_ABI", target.cxx11_abi.as_str());
    for include in &target.python_includes {
        build.flag("-isystem").flag(include);
    }
    let compiler = build.try_get_compiler().map_err(|error| format!("no compiler for C++: {error}"))?;
    let mut command = compiler.to_command();
    command.args(["-shared", "csrc/register.cpp", "-Wl,--gc-sections", "-Wl,--no-as-needed", "-L"]).arg(stubs);
    command.args(LIBRARIES.map(|library| format!("-l{library}"))).arg("-o").arg(file);
    run(&mut command).map_err(|error| format!("csrc/ does not compile for {}: {error}", target.file_name()))
}

fn run(command: &mut Command) -> Result<()> {
    let output =
        command.output().map_err(|error| format!("{} does not run: {error}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", command.get_program().display(), String::from_utf8_lossy(&output.stderr)))
}
