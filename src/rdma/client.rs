//! The side that reads and writes: a thread that sends requests and takes answers, and never blocks in either.
//!
//! Reads within a host that need no help of the peer are no requests: short ones are done where they are posted.
//!
//! The peer answers in the order of requests. So what is under way is a queue, whose head the next answer is for. A span may
//! take two requests, so operations that are in flight together end in any order.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::rdma::direct::{Direct, Unread};
use crate::rdma::error::RdmaError;
use crate::rdma::memory::{Located, Refusal, RemoteBuffer};
use crate::rdma::pending::Pending;
use crate::rdma::protocol::{ANSWER_BYTES, Answer, Ask, LOCATED_BYTES, READS_MAX, REQUEST_BYTES, Request, Say};
use crate::rdma::span::{Kind, Span};
use crate::rdma::ucx;
use crate::rdma::wire::Wire;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::ucx::{Endpoint, RegisteredMemory};

/// A span that was given to the thread.
struct Active {
    kind: Kind,
    /// What lets the peer read the local bytes through UCX, for `Pull`. Before the span, which has the bytes, so that it ends first.
    registered: Option<Arc<RegisteredMemory>>,
    span: Span,
    /// Its place in its operation, and the number of spans there.
    place: (usize, usize),
    timeout: Duration,
    deadline: Option<Instant>,
    pending: Pending,
    /// What the peer is asked next, or was.
    ask: Ask,
    /// Bytes that have come.
    received: usize,
}

impl Active {
    /// Which part of the operation it is, in words.
    fn name(&self) -> String {
        let (place, spans) = self.place;
        let Span { len, remote, .. } = &self.span;
        let which = if spans > 1 { format!("span {place} of {spans}, ") } else { String::new() };
        format!("{which}{len} bytes at {:#x}", remote.address)
    }

    fn broken(&self, peer: &str, cause: &str) -> RdmaError {
        let (operation, span) = (self.kind.name(), self.name());
        RdmaError::Broken { operation, peer: peer.to_owned(), span, cause: cause.to_owned() }
    }

    fn request(&self) -> Request {
        let Span { local, offset, len, remote } = &self.span;
        let source = local.address() + *offset as u64;
        Request { ask: self.ask, remote: RemoteBuffer { len: *len, ..*remote }, source, packed: self.key().len() }
    }

    /// What follows the request's header, for `Pull`.
    fn key(&self) -> &[u8] {
        self.registered.as_ref().filter(|_| self.ask == Ask::Pull).map_or(&[], |registered| registered.key())
    }
}

/// What other threads tell the one of the client.
#[derive(Default)]
struct Inbox {
    posted: Vec<Active>,
    /// Why the connection has ended.
    ended: Option<String>,
    closing: bool,
}

/// A connection to a peer, and what is under way on it.
pub(super) struct Client {
    peer: String,
    inbox: Arc<Mutex<Inbox>>,
    waker: UnixStream,
    wire: &'static str,
    devices: Vec<String>,
    direct: Option<Arc<Direct>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Client {
    /// Works on a connection to `peer` whose sides have proved themselves. Long spans go through UCX, if the two have connected
    /// that way; else, where `reads_directly`, the two may read each other's memory within a host.
    pub(super) fn start(wire: Wire, ucx: Option<Endpoint>, peer: String, reads_directly: bool) -> io::Result<Client> {
        let (waker, woken) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let inbox: Arc<Mutex<Inbox>> = Arc::default();
        let devices = ucx.iter().flat_map(Endpoint::devices).map(|device| device.to_string()).collect();
        let name = if ucx.is_some() { UCX } else { wire.name() };
        let wire = Arc::new(wire);
        let direct = Direct::new(&wire).filter(|_| reads_directly && ucx.is_none()).map(Arc::new);
        let mut progress = Progress {
            direct: direct.clone(),
            wire,
            ucx,
            reads: 0,
            waiting: VecDeque::new(),
            reading: Vec::new(),
            next_token: 0,
            peer: peer.clone(),
            inbox: inbox.clone(),
            woken,
            to_send: VecDeque::new(),
            sent: 0,
            to_read: VecDeque::new(),
            asked: VecDeque::new(),
            head: [0; ANSWER_BYTES],
            head_len: 0,
            body: None,
            next_deadline: None,
        };
        let thread = std::thread::Builder::new().name("ncclx_rs rdma".to_owned()).spawn(move || progress.run())?;
        Ok(Client { peer, inbox, waker, wire: name, devices, direct, thread: Some(thread) })
    }

    /// Why it is of no use any more, if it is not.
    pub(super) fn ended(&self) -> Option<String> {
        lock(&self.inbox).ended.clone()
    }

    /// The wire's name.
    pub(super) fn wire(&self) -> &'static str {
        self.wire
    }

    /// What UCX goes through.
    pub(super) fn devices(&self) -> &[String] {
        &self.devices
    }

    /// Begins an operation of spans that are inside their memories. It ends when all of them have, and after `timeout` at the latest.
    /// Short reads that need nobody's help are done before this returns.
    pub(super) fn post(&self, kind: Kind, spans: Vec<Span>, timeout: Duration) -> Result<Pending, RdmaError> {
        if let Some(cause) = self.ended() {
            return Err(RdmaError::NotConnected { operation: kind.name(), cause });
        }
        let bytes = || spans.iter().fold(0, |sum: usize, span| sum.saturating_add(span.len));
        let is_short = || spans.len() <= HERE_SPANS && bytes() <= HERE_BYTES;
        let direct = self.direct.as_ref().filter(|_| kind == Kind::Read && is_short());
        let (pending, count) = (Pending::new(spans.len()), spans.len());
        let deadline = Instant::now().checked_add(timeout);
        let active = spans.into_iter().enumerate().map(|(index, span)| Active {
            kind,
            // How it is asked for is the thread's to say.
            ask: if kind == Kind::Write { Ask::Write } else { Ask::Read },
            span,
            place: (index + 1, count),
            timeout,
            deadline,
            pending: pending.clone(),
            received: 0,
            registered: None,
        });
        let is_left = |active: &Active| {
            let is_read = direct.is_some_and(|direct| direct.read(&active.span).is_ok());
            if is_read {
                pending.end_span(Ok(()));
            }
            !is_read
        };
        let left: Vec<Active> = active.filter(is_left).collect();
        if left.is_empty() {
            return Ok(pending);
        }
        let mut inbox = lock(&self.inbox);
        if let Some(cause) = &inbox.ended {
            return Err(RdmaError::NotConnected { operation: kind.name(), cause: cause.clone() });
        }
        inbox.posted.extend(left);
        drop(inbox);
        self.wake();
        Ok(pending)
    }

    fn wake(&self) {
        // A full socket wakes as well.
        let _ = (&self.waker).write(&[0]);
    }

    /// Ends the connection and what is under way. Returns when the thread has ended.
    pub(super) fn stop(&mut self) {
        lock(&self.inbox).closing = true;
        self.direct = None;
        self.wake();
        if let Some(thread) = self.thread.take() {
            // A panic was printed when it happened.
            let _ = thread.join();
        }
    }

    /// The peer in messages.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }
}

/// The part of an answer behind its header.
enum Body {
    Data { left: usize },
    Text { bytes: Vec<u8>, len: usize, say: Say },
}

/// The state of the thread.
struct Progress {
    wire: Arc<Wire>,
    direct: Option<Arc<Direct>>,
    ucx: Option<Endpoint>,
    /// How many reads go through UCX now, from the question for a key to the peer's last word.
    reads: usize,
    /// Reads that will, the oldest first.
    waiting: VecDeque<Active>,
    /// Reads whose bytes are on their way, by their tokens.
    reading: Vec<(u64, Active)>,
    next_token: u64,
    peer: String,
    inbox: Arc<Mutex<Inbox>>,
    woken: UnixStream,
    /// Requests that are not written, the oldest first.
    to_send: VecDeque<Active>,
    /// Bytes written of the first one, its header included.
    sent: usize,
    /// Reads that need nobody's help, the oldest first.
    to_read: VecDeque<Active>,
    /// Requests that are written, the oldest first.
    asked: VecDeque<Active>,
    head: [u8; ANSWER_BYTES],
    head_len: usize,
    body: Option<Body>,
    /// No deadline is before this one.
    next_deadline: Option<Instant>,
}

/// Why the thread ends.
enum End {
    Closed,
    Broken(String),
    TimedOut,
}

impl Progress {
    fn run(&mut self) {
        let end = loop {
            if let Err(end) = self.turn() {
                break end;
            }
        };
        // First, so that the peer reads nothing of this process's memory after the operations have ended.
        self.wire.shut_down();
        // Nor is anything written to it through UCX.
        self.ucx = None;
        let reading = self.reading.drain(..).map(|(_, active)| active);
        let queued = self.asked.drain(..).chain(self.to_send.drain(..)).chain(self.to_read.drain(..));
        let queued = queued.chain(self.waiting.drain(..));
        let mut left: Vec<Active> = queued.chain(reading).collect();
        let (mut cause, now) = (String::new(), Instant::now());
        match end {
            End::Closed => cause.push_str("the transport was closed"),
            End::Broken(how) => cause = how,
            End::TimedOut => {
                let late = left.iter().find(|active| is_due(active, now)).map_or_else(String::new, Active::name);
                cause = format!("the peer did not complete {late} in time");
            }
        }
        {
            let mut inbox = lock(&self.inbox);
            inbox.ended = Some(cause.clone());
            left.append(&mut inbox.posted);
        }
        for active in left {
            let error = if is_due(&active, now) {
                let (operation, peer, span) = (active.kind.name(), self.peer.clone(), active.name());
                RdmaError::Timeout { operation, peer, span, waited: active.timeout }
            } else {
                active.broken(&self.peer, &cause)
            };
            active.pending.end_span(Err(error));
        }
    }

    /// Sleeps until there is something to do, and does it.
    fn turn(&mut self) -> Result<(), End> {
        self.sleep()?;
        self.take_posted()?;
        let broken = |error: io::Error| End::Broken(error.to_string());
        // What is left wakes again: time limits and a close are looked at between.
        for _ in 0..TURN_CALLS {
            if !self.receive().map_err(broken)? {
                break;
            }
        }
        self.progress_ucx().map_err(broken)?;
        for _ in 0..TURN_CALLS {
            if !self.send().map_err(broken)? {
                break;
            }
        }
        self.read_directly();
        let now = Instant::now();
        if self.next_deadline.is_none_or(|next| now < next) {
            return Ok(());
        }
        let reading = || self.reading.iter().map(|(_, active)| active);
        let queued = || self.to_send.iter().chain(&self.to_read).chain(&self.waiting);
        let under_way = || self.asked.iter().chain(queued()).chain(reading());
        if under_way().any(|active| is_due(active, now)) {
            return Err(End::TimedOut);
        }
        self.next_deadline = under_way().filter_map(|active| active.deadline).min();
        Ok(())
    }

    fn sleep(&mut self) -> Result<(), End> {
        if let Some(endpoint) = &mut self.ucx
            && !endpoint.arm().map_err(|error| End::Broken(format!("UCX: {error}")))?
        {
            return Ok(());
        }
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.to_send.is_empty());
        let mut watched = vec![
            PollFd::from_borrowed_fd(self.wire.as_fd(), wanted),
            PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN),
        ];
        watched.extend(self.ucx.iter().map(|endpoint| PollFd::from_borrowed_fd(endpoint.as_fd(), PollFlags::IN)));
        let mut left = self.next_deadline.map(|next| next.saturating_duration_since(Instant::now()));
        if !self.to_read.is_empty() {
            left = Some(Duration::ZERO);
        }
        let left = left.map(ucx::timespec);
        match rustix::event::poll(&mut watched, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(End::Broken(error.to_string())),
        }
    }

    fn take_posted(&mut self) -> Result<(), End> {
        let mut bytes = [0; 64];
        // All that is there is read; the rest wakes again.
        let _ = rustix::net::recv(&self.woken, &mut bytes[..], rustix::net::RecvFlags::DONTWAIT);
        let mut inbox = lock(&self.inbox);
        if inbox.closing {
            return Err(End::Closed);
        }
        let posted = std::mem::take(&mut inbox.posted);
        drop(inbox);
        for mut active in posted {
            self.next_deadline = self.next_deadline.into_iter().chain(active.deadline).min();
            if active.kind == Kind::Read && self.is_direct() {
                active.ask = Ask::Locate;
                self.to_read.push_back(active);
                continue;
            }
            let Span { local, len, .. } = &active.span;
            if self.ucx.is_some() && (*len >= DIRECT_BYTES || local.is_on_device()) {
                self.ask_through_ucx(active);
                continue;
            }
            // Otherwise bytes travel with the request or the answer.
            if *len >= DIRECT_BYTES && self.is_direct() {
                active.ask = Ask::WriteFrom;
            }
            self.to_send.push_back(active);
        }
        self.begin_reads();
        Ok(())
    }

    /// Has UCX bring the bytes of a span.
    fn ask_through_ucx(&mut self, mut active: Active) {
        let Some(endpoint) = &self.ucx else { return };
        match endpoint.register(&active.span.local) {
            Ok(_) if active.kind == Kind::Read => {
                active.ask = Ask::Expose;
                self.waiting.push_back(active);
            }
            Ok(registered) => {
                active.ask = Ask::Pull;
                active.registered = Some(registered);
                self.to_send.push_back(active);
            }
            Err(error) => {
                let cause = format!("UCX cannot register {}: {error}", active.name());
                let error = RdmaError::Os { operation: active.kind.name(), cause };
                active.pending.end_span(Err(error));
            }
        }
    }

    /// The peer says that the bytes of the oldest request lie on a device.
    fn is_on_device(&mut self) {
        if self.ucx.is_none() {
            return self.refused(Refusal::OnDevice.to_string());
        }
        if let Some(active) = self.asked.pop_front() {
            self.ask_through_ucx(active);
            self.begin_reads();
        }
    }

    /// Asks for the keys of as many reads through UCX as there may be at once.
    fn begin_reads(&mut self) {
        while self.reads < READS_MAX
            && let Some(active) = self.waiting.pop_front()
        {
            self.reads += 1;
            self.to_send.push_back(active);
        }
    }

    /// Goes on with what the two sides read through UCX. Whether bytes that have come count, the peer is asked next.
    fn progress_ucx(&mut self) -> io::Result<()> {
        let Some(endpoint) = &mut self.ucx else { return Ok(()) };
        for (token, ended) in endpoint.progress() {
            ended.map_err(|error| io::Error::other(format!("UCX: {error}")))?;
            if let Some(at) = self.reading.iter().position(|(other, _)| *other == token) {
                let (_, mut active) = self.reading.swap_remove(at);
                active.ask = Ask::Confirm;
                self.to_send.push_back(active);
            }
        }
        ucx::check(endpoint)
    }

    /// Reads the bytes of the oldest request through UCX, by the key that the peer has sent.
    fn read_by(&mut self, key: &[u8]) -> io::Result<()> {
        let (Some(endpoint), Some(active)) = (&mut self.ucx, self.asked.pop_front()) else { return Ok(()) };
        let Span { local, offset, len, remote } = &active.span;
        let begun = endpoint.get(self.next_token, (remote.address, key), (local, *offset, *len));
        self.reading.push((self.next_token, active));
        self.next_token += 1;
        begun.map_err(|error| io::Error::other(format!("UCX: {error}")))
    }

    /// Writes a part of the first request. True: there is more to write, and there may be room.
    fn send(&mut self) -> io::Result<bool> {
        let Some(active) = self.to_send.front() else { return Ok(false) };
        let Span { local, offset, len, .. } = &active.span;
        let payload = if active.ask == Ask::Write { *len } else { active.key().len() };
        let written = if self.sent < REQUEST_BYTES {
            self.wire.try_write(&active.request().encode()[self.sent..])
        } else {
            let done = self.sent - REQUEST_BYTES;
            match active.ask {
                Ask::Pull => self.wire.try_write(&active.key()[done..]),
                _ => local.send(self.wire.as_fd(), offset + done, payload - done),
            }
        };
        let Some(written) = passing(written)? else { return Ok(false) };
        self.sent += written;
        if self.sent == REQUEST_BYTES + payload
            && let Some(active) = self.to_send.pop_front()
        {
            self.sent = 0;
            self.asked.push_back(active);
        }
        Ok(true)
    }

    /// Reads a part of the next answer. True: there may be more.
    fn receive(&mut self) -> io::Result<bool> {
        let hung_up =
            || io::Error::new(io::ErrorKind::UnexpectedEof, "the peer has closed it, or its process has ended");
        match &mut self.body {
            None => {
                let read = self.wire.try_read(&mut self.head[self.head_len..]);
                let Some(read) = passing(read)? else { return Ok(false) };
                if read == 0 {
                    return Err(hung_up());
                }
                self.head_len += read;
                if self.head_len == ANSWER_BYTES {
                    self.head_len = 0;
                    let answer = Answer::decode(&self.head).map_err(io::Error::other)?;
                    self.begin(answer)?;
                }
            }
            Some(Body::Data { left }) => {
                let active = self.asked.front_mut().expect("its data is being received");
                let at = active.span.offset + active.received;
                let Some(read) = passing(active.span.local.receive(self.wire.as_fd(), at, *left))? else {
                    return Ok(false);
                };
                if read == 0 {
                    return Err(hung_up());
                }
                active.received += read;
                *left -= read;
                if *left == 0 {
                    self.body = None;
                }
            }
            Some(Body::Text { bytes, len, say }) => {
                let mut more = vec![0; *len - bytes.len()];
                let Some(read) = passing(self.wire.try_read(&mut more))? else { return Ok(false) };
                if read == 0 {
                    return Err(hung_up());
                }
                bytes.extend_from_slice(&more[..read]);
                if bytes.len() == *len {
                    let (bytes, say) = (std::mem::take(bytes), *say);
                    self.body = None;
                    match say {
                        Say::Packed => self.read_by(&bytes)?,
                        Say::Located => self.located(&bytes),
                        _ => self.refused(String::from_utf8_lossy(&bytes).into_owned()),
                    }
                }
            }
        }
        Ok(true)
    }

    /// Takes the header of an answer to the oldest request.
    fn begin(&mut self, answer: Answer) -> io::Result<()> {
        let stray = |what: &str| io::Error::other(format!("the peer sent {what}"));
        let Some(active) = self.asked.front() else { return Err(stray("an answer to nothing")) };
        match answer.say {
            Say::Data if active.ask == Ask::Read && answer.len <= active.span.len - active.received => {
                self.body = (answer.len > 0).then_some(Body::Data { left: answer.len });
            }
            Say::Data => return Err(stray("bytes that were not asked for")),
            Say::Failed if answer.len == 0 => self.refused("no reason given".to_owned()),
            say @ (Say::Failed | Say::Packed | Say::Located) => {
                let is_asked_for = match say {
                    Say::Packed => active.ask == Ask::Expose && answer.len > 0,
                    Say::Located => active.ask == Ask::Locate && answer.len == LOCATED_BYTES,
                    _ => true,
                };
                if !is_asked_for {
                    return Err(stray("a key that was not asked for"));
                }
                self.body = Some(Body::Text { bytes: Vec::new(), len: answer.len, say });
            }
            Say::Done if matches!(active.ask, Ask::Expose | Ask::Locate) => return Err(stray("no key")),
            Say::CannotRead if active.ask == Ask::WriteFrom => {
                self.forbid_direct();
                self.ask_again(Ask::Write);
            }
            Say::OnDevice if matches!(active.ask, Ask::Write | Ask::WriteFrom | Ask::Read | Ask::Locate) => {
                self.is_on_device();
            }
            Say::CannotRead | Say::OnDevice => return Err(stray("an answer to something else")),
            Say::Done if active.ask == Ask::Read && active.received < active.span.len => {
                return Err(stray("the end of a read before its bytes"));
            }
            Say::Done => {
                if let Some(active) = self.pop_asked() {
                    active.pending.end_span(Ok(()));
                }
            }
        }
        Ok(())
    }

    /// Takes the oldest request, which the peer has answered for good.
    fn pop_asked(&mut self) -> Option<Active> {
        let active = self.asked.pop_front()?;
        if self.ucx.is_some() && matches!(active.ask, Ask::Expose | Ask::Confirm) {
            self.reads -= 1;
            self.begin_reads();
        }
        Some(active)
    }

    fn refused(&mut self, cause: String) {
        let Some(active) = self.pop_asked() else { return };
        let (operation, peer, span) = (active.kind.name(), self.peer.clone(), active.name());
        active.pending.end_span(Err(RdmaError::Refused { operation, peer, span, cause }));
    }

    /// Asks something else for the oldest request.
    fn ask_again(&mut self, ask: Ask) {
        let Some(active) = self.asked.pop_front() else { return };
        self.to_send.push_back(Active { ask, ..active });
    }

    /// Whether the two processes may read each other's memory, as far as is known.
    fn is_direct(&self) -> bool {
        self.direct.as_ref().is_some_and(|direct| direct.is_allowed())
    }

    fn forbid_direct(&self) {
        if self.direct.as_ref().is_some_and(|direct| direct.forbid()) {
            log::debug!("{} and this process cannot read each other's memory; bytes go through the socket", self.peer);
        }
    }

    /// Takes the peer's word of where the bytes of the oldest request lie. They are read there next.
    fn located(&mut self, bytes: &[u8]) {
        let Some(mut active) = self.asked.pop_front() else { return };
        if let (Some(direct), Some((located, _))) = (&self.direct, bytes.split_first_chunk()) {
            direct.learn(active.span.remote.key, Located::decode(located));
        }
        // What cannot be read there is not located again.
        active.ask = Ask::Read;
        self.to_read.push_back(active);
    }

    /// Reads some of the spans that are read where they lie, the oldest first.
    fn read_directly(&mut self) {
        let mut left = TURN_BYTES;
        while left > 0
            && let Some(active) = self.to_read.pop_front()
        {
            left = left.saturating_sub(active.span.len.max(SPAN_COST));
            self.read_on(active);
        }
    }

    /// Reads a piece of a span, or else asks the peer for what the span's request says.
    fn read_on(&mut self, mut active: Active) {
        let Some(direct) = &self.direct else { return };
        let left = active.span.len - active.received;
        let copied = direct.copy(&active.span, active.received, left.min(TURN_BYTES));
        if copied.is_ok() && left > TURN_BYTES {
            active.received += TURN_BYTES;
            return self.to_read.push_front(active);
        }
        active.received = 0;
        match copied.and_then(|()| direct.confirm(&active.span)) {
            Ok(()) => return active.pending.end_span(Ok(())),
            Err(Unread::Unknown) => {}
            // Why, the peer says.
            Err(Unread::Revoked) => active.ask = Ask::Read,
            Err(Unread::Forbidden) => {
                self.forbid_direct();
                active.ask = Ask::Read;
            }
        }
        self.to_send.push_back(active);
    }
}

fn is_due(active: &Active, now: Instant) -> bool {
    active.deadline.is_some_and(|deadline| deadline <= now)
}

/// The count of a call that may have to be made again later, for which there is none.
fn passing(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The wire's name where bytes go through UCX.
pub(super) const UCX: &str = "ucx";

/// Writes of so many bytes are read where they lie, within a host and through UCX, and so are reads through UCX.
const DIRECT_BYTES: usize = 16 * 1024;

/// Reads of so many bytes, and of so many spans, are done by the thread that posts them, if they need nobody's help.
const HERE_BYTES: usize = 256 * 1024;
const HERE_SPANS: usize = 64;

/// How much the thread copies before it looks at requests and limits again.
const TURN_BYTES: usize = 4 << 20;

/// How often a turn reads from or writes to the socket, which takes some hundred kilobytes at once.
const TURN_CALLS: usize = 64;

/// As many bytes are copied while a span is begun and ended.
const SPAN_COST: usize = 16 << 10;
