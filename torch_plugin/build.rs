//! Compiles csrc/ against the PyTorch that is installed for the interpreter that will import the extension.

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const OLDEST: (u32, u32) = (2, 11);
const NEWEST: (u32, u32) = (2, 15);

/// Set where nothing is linked, as in lints: csrc/ takes a minute to compile.
const CHECK_ONLY: &str = "NCCLX_RS_CHECK_ONLY";

const PROBE: &str = "
import os, sysconfig, torch
print(torch.__version__)
print(os.path.dirname(torch.__file__))
print(sysconfig.get_paths()['include'])
print(int(torch.compiled_with_cxx11_abi()))
";

fn main() -> ExitCode {
    for name in ["NCCLX_RS_PYTHON", "PYO3_PYTHON", "VIRTUAL_ENV", CHECK_ONLY] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=csrc");
    match find_torch().and_then(|torch| compile(&torch)) {
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

struct Torch {
    version: String,
    root: PathBuf,
    python_include: String,
    cxx11_abi: String,
}

fn python() -> PathBuf {
    let named = env::var_os("NCCLX_RS_PYTHON").or_else(|| env::var_os("PYO3_PYTHON")).map(PathBuf::from);
    let in_venv = || env::var_os("VIRTUAL_ENV").map(|venv| PathBuf::from(venv).join("bin/python"));
    named.or_else(in_venv).unwrap_or_else(|| "python3".into())
}

fn find_torch() -> Result<Torch, String> {
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
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines().rev().take(4).map(str::to_owned);
    let mut line = || lines.next().ok_or_else(|| format!("{} did not describe its PyTorch", python.display()));
    let (cxx11_abi, python_include, root, version) = (line()?, line()?, line()?, line()?);
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
    Ok(Torch { version, root: root.into(), python_include, cxx11_abi })
}

fn compile(torch: &Torch) -> Result<(), String> {
    let include = torch.root.join("include");
    println!("cargo:rerun-if-changed={}", include.join("torch/headeronly/version.h").display());
    println!("cargo:rustc-env=NCCLX_RS_TORCH_VERSION={}", torch.version);
    if env::var_os(CHECK_ONLY).is_some() {
        return Ok(());
    }
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .file("csrc/register.cpp")
        .std("c++20")
        .opt_level(2)
        .debug(false)
        .flag("-fvisibility=hidden")
        .flag("-fvisibility-inlines-hidden")
        .flag("-isystem")
        .flag(&include)
        .flag("-isystem")
        .flag(&torch.python_include)
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Wno-unused-parameter")
        .define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi.as_str());
    build.try_compile("ncclx_rs_shim").map_err(|error| format!("csrc/ does not compile: {error}"))?;
    println!("cargo:rustc-link-search=native={}", torch.root.join("lib").display());
    for library in ["c10", "torch_cpu", "torch_python"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    Ok(())
}
