//! Whether there is CUDA, tests in processes of their own, and what only the software CUDA can be asked.

use std::ffi::{CStr, CString, c_char, c_long, c_void};
use std::io::Write;
use std::process::Command;
use std::time::Duration;

use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{Context, Device, driver_version};
use ncclx_rs::sys::nccl::Vendor;

/// The first device's context; nothing where there is no driver.
///
/// # Panics
/// Where there must be one.
pub(crate) fn context() -> Option<Arc<Context>> {
    let is_set = |name| std::env::var(name).is_ok_and(|value| value == "1");
    match driver_version().and_then(|_| Device::new(0)).and_then(Context::primary) {
        Ok(context) => Some(context),
        Err(error) if is_set("NCCLX_RS_CI") && is_set("NCCLX_RS_TEST_CUDA") => panic!("CUDA must be here: {error}"),
        Err(error) => {
            not_run(&error.to_string());
            None
        }
    }
}

/// Says why this test is not run, also in the file that `NCCLX_RS_TEST_NOT_RUN` names.
pub(crate) fn not_run(reason: &str) {
    eprintln!("not run: {reason}");
    if let Some(file) = std::env::var_os("NCCLX_RS_TEST_NOT_RUN") {
        let test = std::env::var(ALONE).ok().or_else(|| std::thread::current().name().map(str::to_owned));
        let line = format!("{}: {reason}\n", test.expect("a test's thread has its name"));
        let mut file = std::fs::OpenOptions::new().append(true).open(file).expect("the file of who runs the tests");
        file.write_all(line.as_bytes()).expect("room");
    }
}

/// Settings that only make trouble likelier on the software CUDA: without them, too, a test must pass.
const TROUBLE: [&str; 7] = [
    "SOFTCUDA_DELAY_US",
    "SOFTCUDA_GAP_US",
    "SOFTCUDA_SEED",
    "SOFTCUDA_WEAK",
    "SOFTCUDA_QUEUES",
    "SOFTCUDA_PEERS",
    "SOFTCUDA_HOST_POINTERS_DIFFER",
];

/// Whether a test can run with these settings here; if not, it says why.
pub(crate) fn can_have(settings: &[(&str, &str)]) -> bool {
    let more = settings.iter().find(|(name, _)| name.starts_with("SOFTCUDA_") && !TROUBLE.contains(name));
    match more {
        Some((name, _)) if symbol(c"softcuda_uses").is_none() => {
            not_run(&format!("a GPU has no {name}"));
            false
        }
        _ => true,
    }
}

/// Whether a world on these devices can run here; if not, it says why.
pub(crate) fn has_devices(devices: &[u32]) -> bool {
    let lacking = devices.iter().find(|device| Device::new(**device).is_err());
    if let Some(device) = lacking {
        not_run(&format!("there is no device {device}"));
    }
    lacking.is_none()
}

/// Names the test that a process was begun for.
const ALONE: &str = "NCCLX_RS_TEST_ALONE";

/// The threads that must not call the driver, which may make them wait for a device: the one that makes progress, the one that
/// watches what is in flight, and the one that sends heartbeats.
const FREE_OF_CUDA: &str = "ncclx_rs engine,ncclx_rs device,ncclx_rs_watch";

/// This program, to run one test of it in a process of its own.
pub(crate) fn program(test: &str) -> Command {
    let mut program = Command::new(std::env::current_exe().expect("this program"));
    program.args(["--exact", test, "--nocapture"]).env(ALONE, test).env("SOFTCUDA_FORBIDDEN_THREADS", FREE_OF_CUDA);
    program
}

/// Looks at what a process of [`program`] has written to standard error.
///
/// # Panics
/// When one of the threads has called the driver.
pub(crate) fn check_threads(text: &str) {
    let breach = text.lines().find(|line| line.contains("against the rules") && line.contains(" called on thread "));
    assert!(breach.is_none(), "{breach:?}");
}

/// Whether this process was begun for a test alone.
pub(crate) fn is_alone(test: &str) -> bool {
    std::env::var(ALONE).is_ok_and(|alone| alone == test)
}

/// Runs `body` in processes of its own, one with each of these settings. It is called in the test of that name.
pub(crate) fn alone(test: &str, settings: &[&[(&str, &str)]], body: impl FnOnce()) {
    if is_alone(test) {
        watch(test);
        return body();
    }
    if context().is_none() {
        return;
    }
    for settings in settings {
        if !can_have(settings) {
            continue;
        }
        let output = program(test).envs(settings.iter().copied()).output().expect("a process");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "with {settings:?}: {text}");
        check_threads(&text);
    }
}

/// The number that a variable of the environment has.
pub(crate) fn number(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().unwrap_or_else(|_| panic!("{name}: a number is expected")))
}

/// Seeds from that of the first variable on, or from 1, as many as the second says, or ten.
pub(crate) fn seeds(first: &str, how_many: &str) -> impl Iterator<Item = u64> {
    (number(first).unwrap_or(1)..).take(number(how_many).unwrap_or(10) as usize)
}

/// Ends this process, begun for a test alone, if a stream waits for ever.
pub(crate) fn watch(test: &str) {
    let test = test.to_owned();
    std::thread::spawn(move || {
        // Several times as long as the longest takes on a busy machine.
        std::thread::sleep(Duration::from_secs(300));
        eprintln!("{test} does not end");
        let process = std::process::id().to_string();
        let mut gdb = Command::new("timeout");
        gdb.args(["60", "gdb", "-nx", "-batch", "-p", &process, "-ex", "thread apply all backtrace 12"]);
        gdb.env_remove("LD_PRELOAD").env_remove("DEBUGINFOD_URLS");
        // This process stands still meanwhile: it could not read what gdb writes.
        if let Err(error) = gdb.stdout(std::io::stderr()).status() {
            eprintln!("its stacks are not known, since gdb does not begin: {error}");
        }
        std::process::abort();
    });
}

/// A function of the software CUDA, or of CUDA; nothing if it has none of that name.
pub(crate) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// What the software CUDA counts and does; nothing on another one.
pub(crate) struct Software {
    uses: unsafe extern "C" fn(*const c_char) -> u64,
    calls: unsafe extern "C" fn(*mut c_char, usize) -> usize,
    plant: unsafe extern "C" fn(*const c_char),
    living: unsafe extern "C" fn(*const c_char) -> c_long,
    copied_bytes: unsafe extern "C" fn() -> u64,
    breaches: unsafe extern "C" fn() -> u64,
}

impl Software {
    pub(crate) fn new() -> Option<Software> {
        let Some(uses) = symbol(c"softcuda_uses") else {
            not_run("only the software CUDA can be asked");
            return None;
        };
        let calls = symbol(c"softcuda_calls")?;
        let (plant, living) = (symbol(c"softcuda_plant")?, symbol(c"softcuda_living")?);
        let (copied_bytes, breaches) = (symbol(c"softcuda_copied_bytes")?, symbol(c"softcuda_breaches")?);
        Some(Software {
            // SAFETY: tests/softcuda declares it so.
            uses: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(uses) },
            // SAFETY: as above.
            calls: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_char, usize) -> usize>(calls)
            },
            // SAFETY: as above.
            plant: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char)>(plant) },
            // SAFETY: as above.
            living: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_long>(living)
            },
            // SAFETY: as above.
            copied_bytes: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(copied_bytes) },
            // SAFETY: as above.
            breaches: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(breaches) },
        })
    }

    /// How often a function of the driver has been called.
    pub(crate) fn uses(&self, call: &str) -> u64 {
        let call = CString::new(call).expect("a name");
        // SAFETY: the name ends with a zero.
        unsafe { (self.uses)(call.as_ptr()) }
    }

    /// How many bytes have been copied.
    pub(crate) fn copied_bytes(&self) -> u64 {
        // SAFETY: it takes nothing.
        unsafe { (self.copied_bytes)() }
    }

    /// How often CUDA's rules have been broken.
    pub(crate) fn breaches(&self) -> u64 {
        // SAFETY: it takes nothing.
        unsafe { (self.breaches)() }
    }

    /// The functions that have been called.
    pub(crate) fn calls(&self) -> Vec<String> {
        let mut text = vec![0u8; 1 << 16];
        // SAFETY: there is room for so many bytes.
        unsafe { (self.calls)(text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).expect("an end").to_string_lossy().into_owned();
        text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
    }

    /// Has a call fail at a use, counted from the start of the process.
    pub(crate) fn plant(&self, call: &str, at: u64) {
        let fault = CString::new(format!("{call}:{at}")).expect("a fault");
        // SAFETY: the text ends with a zero.
        unsafe { (self.plant)(fault.as_ptr()) };
    }

    /// How many things of CUDA there are.
    pub(crate) fn living(&self) -> i64 {
        // SAFETY: the text ends with a zero.
        unsafe { (self.living)(c"".as_ptr()) }
    }

    /// How many there are once what is given back later is gone.
    pub(crate) fn settled(&self) -> i64 {
        let (mut before, mut looks) = (self.living(), 0);
        while looks < 5 {
            std::thread::sleep(Duration::from_millis(200));
            let now = self.living();
            looks = if now == before { looks + 1 } else { 0 };
            before = now;
        }
        before
    }
}

/// How often the fake NCCL has been called for something in this process: `groups`, `sends`, `receives`, `ids` or `splits`.
pub(crate) fn calls_of_nccl(what: &str) -> u64 {
    calls_of(Vendor::Nccl, what)
}

/// As [`calls_of_nccl`], of either library.
pub(crate) fn calls_of(vendor: Vendor, what: &str) -> u64 {
    let variable = if vendor == Vendor::Nccl { "NCCLX_RS_NCCL_LIBRARY" } else { "NCCLX_RS_RCCL_LIBRARY" };
    let path = std::env::var(variable).expect("tests/softcuda/run sets it");
    let (path, what) = (CString::new(path).expect("a path"), CString::new(what).expect("a name"));
    // SAFETY: the path ends with a zero; the library's initialisers ask nothing of who loads it.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "tests/softcuda/run names a library");
    // SAFETY: the library stays, and the name ends with a zero.
    let count = unsafe { libc::dlsym(library, c"fakenccl_count".as_ptr()) };
    assert!(!count.is_null(), "the fake one counts");
    // SAFETY: tests/fakenccl declares it so.
    let count: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { std::mem::transmute(count) };
    // SAFETY: the text ends with a zero.
    unsafe { count(what.as_ptr()) }
}

/// Begins a capture of a stream, which the engine itself never does, and ends it. What is in between is passed through.
pub(crate) fn captured<T>(stream: u64, body: impl FnOnce() -> T) -> T {
    let begin = symbol(c"cuStreamBeginCapture_v2").expect("CUDA has it");
    let end = symbol(c"cuStreamEndCapture").expect("CUDA has it");
    let mut graph: u64 = 0;
    // SAFETY: cuda.h declares it so.
    let begin: unsafe extern "C" fn(u64, u32) -> u32 = unsafe { std::mem::transmute(begin) };
    // SAFETY: as above.
    let end: unsafe extern "C" fn(u64, *mut u64) -> u32 = unsafe { std::mem::transmute(end) };
    // SAFETY: the caller's stream lives; 1 is CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.
    assert_eq!(unsafe { begin(stream, 1) }, 0);
    let result = body();
    // SAFETY: `graph` is a place for the result. It is left to the end of the process.
    assert_eq!(unsafe { end(stream, &raw mut graph) }, 0);
    result
}
