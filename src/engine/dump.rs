//! What a rank knows of its communicator, as a file that names who is to blame: `ncclx-rs diagnose` reads it.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::engine::copying::CopyStats;
use crate::engine::flight_recorder::Record;
use crate::engine::outbox::LinkStats;
use crate::engine::progress::Engine;
use crate::sys::file_writer::write_aside;
use crate::sys::numa::Home;
use crate::sys::tcp_info::TcpStats;
use crate::transport::{LaneStats, RailStats, RingStats};
use crate::types::{DType, Frame, Rank};

/// The version of the format. Readers refuse others.
const VERSION: u32 = 5;

/// Everything that a dump tells. Times are microseconds of Unix time by this host's clock.
#[derive(Serialize)]
struct Dump<'a> {
    version: u32,
    /// Names the communicator among all; the same on every rank.
    id: &'a str,
    communicator: &'a str,
    rank: u32,
    size: usize,
    /// What the job calls the ranks, in the order of their ranks here.
    members: Vec<u32>,
    host: usize,
    /// The NUMA node that this rank is on, where its memory for what others send is, if its host has several.
    numa: Option<&'a Home>,
    process: u32,
    reason: &'a str,
    time: u64,
    /// How many operations this rank has called, of which the last are told.
    operations: u64,
    /// How many collectives.
    collectives: u64,
    peers: Vec<Peer<'a>>,
    records: Vec<Entry<'a>>,
}

/// What this rank knows of another.
#[derive(Serialize)]
struct Peer<'a> {
    rank: usize,
    host: usize,
    /// How many collectives it is known to have called.
    called: u64,
    /// Why it cannot be reached any more.
    lost: Option<&'a str>,
    /// The transport by which it is reached, once this rank has talked to it, and the devices that UCX goes through.
    transport: Option<&'static str>,
    devices: Vec<String>,
    /// The gets of windows that this rank has read in its memory without its help.
    remote_reads: u64,
    /// How the TCP connection to it does, or did until it was lost, if there is one.
    link: Option<TcpStats>,
    /// What has become of the TCP connections to it, if there are several.
    rails: Option<RailStats>,
    /// Which stream of a connection that communicators share leads to it, if one does.
    lane: Option<LaneStats>,
    /// How the shared memory through which its messages come is read, if they do.
    ring: Option<RingStats>,
    /// How its long messages come that could come in two ways, and what they have cost.
    copies: Vec<CopyStats>,
}

/// An operation.
#[derive(Serialize)]
struct Entry<'a> {
    number: u64,
    operation: &'static str,
    /// Whether every rank calls it, in the same order.
    collective: bool,
    /// Whether it runs on a device. Those operations have sequence numbers of their own.
    device: bool,
    sequence: u64,
    call: String,
    /// The other rank of a message or an access.
    peer: Option<u32>,
    tag: Option<u32>,
    /// A collective's element type; messages and accesses are of bytes.
    dtype: Option<&'static str>,
    /// How many elements of the caller's memory it reads and writes.
    read: usize,
    written: usize,
    state: &'static str,
    /// Of an operation that sends in the call that submits it: right after.
    submitted: u64,
    started: Option<u64>,
    ended: Option<u64>,
    /// Of an operation on a device, how many microseconds it took by that one's clock, where that is measured and known.
    device_microseconds: Option<f64>,
    failure: Option<&'a str>,
    /// Where the program called it, the innermost frame first.
    stack: &'a [Frame],
}

/// This moment on both clocks.
struct Clock {
    instant: Instant,
    unix: Duration,
}

impl Clock {
    fn now() -> Clock {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Clock { instant: Instant::now(), unix }
    }

    fn micros(&self, then: Instant) -> u64 {
        let ago = self.instant.saturating_duration_since(then);
        u64::try_from(self.unix.saturating_sub(ago).as_micros()).unwrap_or(u64::MAX)
    }
}

impl<'a> Entry<'a> {
    fn new(record: &'a Record, clock: &Clock) -> Entry<'a> {
        let call = record.call;
        let element = call.dtype().map_or(1, DType::size);
        let state = match record {
            record if record.failure().is_some() => "failed",
            Record { ended: Some(_), .. } => "completed",
            Record { started: Some(_), .. } => "running",
            _ => "queued",
        };
        Entry {
            number: record.number,
            operation: call.name(),
            collective: call.is_collective(),
            device: record.is_on_device,
            sequence: record.sequence,
            call: call.to_string(),
            peer: call.peer().map(|rank| rank.0),
            tag: call.tag().map(|tag| tag.0),
            dtype: call.dtype().map(DType::name),
            read: record.bytes.read / element,
            written: record.bytes.written / element,
            state,
            submitted: clock.micros(record.submitted),
            started: record.started.map(|at| clock.micros(at)),
            ended: record.ended.map(|at| clock.micros(at)),
            device_microseconds: record.took().map(|time| time.as_secs_f64() * 1e6),
            failure: record.failure(),
            stack: record.stack(),
        }
    }
}

impl Engine {
    /// What this rank knows, as JSON; `reason` says why it is asked.
    pub(crate) fn dump(&self, reason: &str) -> String {
        let clock = Clock::now();
        let others = (0..self.context.size()).map(Rank::from).filter(|rank| *rank != self.context.me);
        let dump = Dump {
            version: VERSION,
            id: &self.id,
            communicator: self.name(),
            rank: self.context.me.0,
            size: self.context.size(),
            members: self.members.iter().map(|rank| rank.0).collect(),
            host: self.context.topo.host_of(self.context.me),
            numa: self.home.as_ref(),
            process: std::process::id(),
            reason,
            time: clock.micros(clock.instant),
            operations: self.context.recorder.count(),
            collectives: self.collectives.next_sequence(),
            peers: others
                .map(|rank| {
                    let endpoints = &self.context.endpoints;
                    let (transport, devices) = endpoints.transport(rank).unzip();
                    let LinkStats { tcp, rails, lane } = endpoints.link_stats(rank);
                    Peer {
                        rank: rank.index(),
                        host: self.context.topo.host_of(rank),
                        called: self.collectives.called(rank),
                        lost: endpoints.lost(rank),
                        transport,
                        devices: devices.unwrap_or_default(),
                        remote_reads: self.windows.remote_reads(rank),
                        link: tcp,
                        rails,
                        lane,
                        ring: endpoints.ring_stats(rank),
                        copies: self.context.rndv.copy_stats(rank),
                    }
                })
                .collect(),
            records: self.context.recorder.records().into_iter().map(|record| Entry::new(record, &clock)).collect(),
        };
        serde_json::to_string(&dump).expect("numbers and texts are JSON")
    }

    /// Has the flight recorder written down after a failure.
    pub(crate) fn write_due_dump(&mut self) {
        if let Some(reason) = self.context.dump_due.take() {
            // The others are told of it first.
            self.progress_sends();
            self.dump_failure(&reason);
        }
    }

    /// Has what this rank knows written to the configured folder, if there is one and the last time was long enough ago.
    pub(crate) fn dump_failure(&mut self, reason: &str) {
        if self.dumped.is_none_or(|at| at.elapsed() >= PAUSE) {
            self.dumped = Some(Instant::now());
            if let Some(file) = self.configured_dump(reason) {
                write_aside(Box::new(move || file.write_and_tell()));
            }
        }
    }

    /// What this rank knows, for the configured folder, if there is one.
    pub(crate) fn configured_dump(&mut self, reason: &str) -> Option<DumpFile> {
        let folder = self.dump_directory.clone()?;
        Some(self.dump_file(folder, reason))
    }

    /// What this rank knows, for a file of that folder.
    pub(crate) fn dump_file(&mut self, folder: PathBuf, reason: &str) -> DumpFile {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
        let name: String = self.name().chars().map(plain).take(64).collect();
        let file = folder.join(format!("ncclx_rs-{name}-{}-rank{}.json", &self.id[..8], self.context.me));
        self.dump_files += 1;
        let partial = file.with_extension(format!("{}-{}.partial", std::process::id(), self.dump_files));
        let what = format!("communicator `{}` rank {}: {reason}", self.name(), self.context.me);
        DumpFile { folder, file, partial, text: self.dump(reason), what }
    }
}

/// A dump that is to be written without the engine's lock, since a folder may be slow.
pub(crate) struct DumpFile {
    folder: PathBuf,
    file: PathBuf,
    /// What it is called until it is whole, for a program that reads meanwhile.
    partial: PathBuf,
    text: String,
    what: String,
}

impl DumpFile {
    /// Writes it, into a folder that is made if need be, and returns its name.
    pub(crate) fn write(&self) -> io::Result<PathBuf> {
        std::fs::create_dir_all(&self.folder)?;
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&self.partial)?
            .write_all(self.text.as_bytes())?;
        std::fs::rename(&self.partial, &self.file)?;
        Ok(self.file.clone())
    }

    /// Writes it, and logs where it is.
    pub(crate) fn write_and_tell(&self) {
        let what = &self.what;
        match self.write() {
            Ok(file) => log::error!("{what}: see {}", file.display()),
            Err(error) => {
                let folder = self.folder.display();
                log::error!("{what}; the flight recorder could not be written to {folder}: {error}");
            }
        }
    }
}

/// Failures that follow each other faster tell nothing new.
const PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use super::*;
    use crate::engine::message::Direction;
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::Words;
    use crate::sync::{Mutex, lock};
    use crate::types::Source;

    /// Held by tests whose dumps are written aside, in turn with those of the whole process.
    static ASIDE: Mutex<()> = Mutex::new(());

    fn dumps(folder: &Path) -> Vec<(PathBuf, Value)> {
        let Ok(files) = std::fs::read_dir(folder) else { return Vec::new() };
        let files = files.map(|file| file.expect("a file").path());
        let read = |file: &PathBuf| std::fs::read_to_string(file).expect("readable");
        files.map(|file| (file.clone(), serde_json::from_str(&read(&file)).expect("JSON"))).collect()
    }

    fn recording(folder: &Path) -> Harness {
        let mut harness = Harness::new();
        harness.engine.context.recorder = crate::engine::flight_recorder::Recorder::new(10);
        harness.engine.dump_directory = Some(folder.to_owned());
        harness
    }

    #[test]
    fn a_failure_is_written_down_once() {
        use std::os::unix::fs::PermissionsExt;
        let _aside = lock(&ASIDE);
        let folder = tempfile::tempdir().expect("a folder");
        // One that is not there yet.
        let place = folder.path().join("dumps");
        let mut harness = recording(&place);
        let mut words = Words::new(vec![0; 4]);
        let receive = Direction::Receive(Source::Rank(Rank(1)));
        for _ in 0..2 {
            assert!(harness.start(receive, &mut words, Duration::ZERO).wait(None).is_err());
        }
        let dumps = dumps(&place);
        let [(file, dump)] = &dumps[..] else { panic!("one file, not {dumps:?}") };
        assert_eq!(file.file_name().expect("a name"), "ncclx_rs-test-00000000-rank0.json");
        assert_eq!(std::fs::metadata(file).expect("there").permissions().mode() & 0o777, 0o600);
        let call = "recv(32 bytes from rank 1, tag 0)";
        assert!(dump["reason"].as_str().expect("a text").starts_with(call), "{dump}");
        let records = dump["records"].as_array().expect("a list");
        assert_eq!(records.len(), 1, "written at the first failure alone: {dump}");
        let expected = [("call", call), ("operation", "recv"), ("state", "failed")];
        assert!(expected.iter().all(|(field, text)| records[0][field] == *text), "{dump}");
        assert_eq!((&records[0]["peer"], &records[0]["collective"]), (&Value::from(1), &Value::from(false)));
        assert!(records[0]["submitted"].as_u64() <= records[0]["ended"].as_u64());
    }

    #[test]
    fn what_is_in_flight_is_told_on_demand() {
        let folder = tempfile::tempdir().expect("a folder");
        // One that is not there yet.
        let place = folder.path().join("dumps");
        let mut harness = recording(&place);
        let mut words = Words::new(vec![0; 4]);
        harness.start(Direction::Receive(Source::Any), &mut words, Duration::from_secs(60));
        let file = harness.engine.dump_file(place.clone(), "somebody asked").write().expect("written");
        let dumps = dumps(&place);
        assert_eq!((&dumps[0].0, &dumps[0].1["reason"]), (&file, &Value::from("somebody asked")));
        let record = &dumps[0].1["records"][0];
        assert_eq!((&record["state"], &record["peer"]), (&Value::from("running"), &Value::Null));
        assert!(record["ended"].is_null() && record["failure"].is_null());
        assert_eq!((&dumps[0].1["peers"][0]["rank"], &dumps[0].1["size"]), (&Value::from(1), &Value::from(2)));
    }

    #[test]
    fn an_operation_ends_in_time_where_the_folder_does_not_answer() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut harness = recording(folder.path());
        let _aside = lock(&ASIDE);
        // Who opens it for writing waits until somebody reads.
        let name = format!("ncclx_rs-test-00000000-rank0.{}-1.partial", std::process::id());
        rustix::fs::mkfifoat(rustix::fs::CWD, folder.path().join(&name), rustix::fs::Mode::RWXU).expect("a pipe");
        let mut words = Words::new(vec![0; 4]);
        let receive = Direction::Receive(Source::Rank(Rank(1)));
        let begin = Instant::now();
        assert!(harness.start(receive, &mut words, Duration::ZERO).wait(None).is_err());
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        let text = std::fs::read_to_string(folder.path().join(&name)).expect("it is written once somebody reads");
        assert!(text.contains("recv(32 bytes from rank 1, tag 0)"), "{text}");
    }

    #[test]
    fn without_a_folder_nothing_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        // One that is not there yet.
        let place = folder.path().join("dumps");
        let mut harness = recording(&place);
        harness.engine.dump_directory = None;
        let mut words = Words::new(vec![0; 4]);
        let work = harness.start(Direction::Receive(Source::Any), &mut words, Duration::ZERO);
        assert!(work.is_done() && dumps(&place).is_empty());
    }
}
