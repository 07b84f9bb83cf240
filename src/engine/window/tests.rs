//! What a hostile or late peer may send: frames written by hand.

use super::*;
use crate::engine::memory::Words;
use crate::error::LinkDown;
use crate::sync::{Arc, Mutex, lock};
use crate::topo::Topology;
use crate::transport::{Accepted, Inlet, Outlet, Transport};

/// What rank 1 has sent and rank 0 has not read.
type Wire = Arc<Mutex<Vec<u8>>>;

/// A transport on which rank 1 writes by hand.
struct ByHand(Option<Wire>);

impl Transport for ByHand {
    fn name(&self) -> &'static str {
        "by hand"
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn open(&mut self, _: Rank, _: &[u8]) -> Result<Box<dyn Outlet>, LinkDown> {
        Err(LinkDown::new("rank 1 only writes"))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let inlet = self.0.take().map(|wire| Box::new(FromWire { wire, seen: Vec::new() }) as Box<dyn Inlet>);
        inlet.into_iter().map(|inlet| (Rank(1), inlet)).collect()
    }

    fn is_accepting(&self) -> bool {
        false
    }
}

struct FromWire {
    wire: Wire,
    seen: Vec<u8>,
}

impl Inlet for FromWire {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        self.seen.append(&mut lock(&self.wire));
        Ok(&self.seen)
    }

    fn consume(&mut self, count: usize) {
        self.seen.drain(..count);
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let count = self.peek()?.len().min(into.len());
        into[..count].copy_from_slice(&self.seen[..count]);
        self.consume(count);
        Ok(count)
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

/// Rank 0 with a window of two words, to which rank 1 writes by hand.
struct Scene {
    core: Core,
    wire: Wire,
    words: Words,
    window: WindowId,
}

impl Scene {
    fn new() -> Scene {
        let wire = Wire::default();
        let topo = Topology::new(&["here", "here"]);
        let transport = Box::new(ByHand(Some(Arc::clone(&wire))));
        let mut core = Core::new("test".to_owned(), Rank(0), topo, vec![transport], vec![None, None]);
        let mut words = Words::new(vec![0; 2]);
        let window = core.windows.expose(Region::of(&[words.buffer()]));
        Scene { core, wire, words, window }
    }

    fn header(kind: FrameKind, window: u64, token: u64, len: u64) -> Vec<u8> {
        control(kind, Lane::PointToPoint, window, token, len).encode().to_vec()
    }

    fn send(&mut self, bytes: &[u8]) {
        lock(&self.wire).extend_from_slice(bytes);
        while self.core.progress(true) {}
    }

    fn signals(&self) -> u64 {
        self.core.windows.exposed[&self.window].signals.get(&Rank(1)).copied().unwrap_or(0)
    }
}

#[test]
fn a_put_lands_where_its_frames_say() {
    let mut scene = Scene::new();
    let id = scene.window.0;
    scene.send(&Scene::header(FrameKind::Put, id, 8, 8));
    scene.send(&7u64.to_ne_bytes());
    scene.send(&Scene::header(FrameKind::Signal, id, 0, 0));
    assert_eq!((scene.words.get(), scene.signals()), ([0, 7].as_slice(), 1));
}

#[test]
fn frames_for_what_is_not_lent_are_dropped_and_the_stream_goes_on() {
    let mut scene = Scene::new();
    let id = scene.window.0;
    for (window, offset, len) in [(id, 9, 8), (id, u64::MAX, 8), (id, 0, 17), (id + 1, 0, 8), (u64::MAX, 0, 0)] {
        scene.send(&Scene::header(FrameKind::Put, window, offset, len));
        scene.send(&vec![0xff; len as usize]);
    }
    scene.send(&Scene::header(FrameKind::Signal, id + 1, 0, 0));
    assert_eq!((scene.words.get(), scene.signals()), ([0, 0].as_slice(), 0));
    scene.send(&Scene::header(FrameKind::Signal, id, 0, 0));
    assert_eq!(scene.signals(), 1);
}

#[test]
fn nothing_is_written_to_a_window_that_was_concealed_amid_a_put() {
    let mut scene = Scene::new();
    scene.send(&Scene::header(FrameKind::Put, scene.window.0, 0, 16));
    scene.send(&7u64.to_ne_bytes());
    assert_eq!(scene.words.get(), [7, 0]);
    scene.core.conceal(scene.window);
    scene.send(&7u64.to_ne_bytes());
    assert_eq!(scene.words.get(), [7, 0]);
    assert!(scene.core.lost(Rank(1)).is_none());
}
