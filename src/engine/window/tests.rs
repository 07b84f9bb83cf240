//! What a hostile or late peer may send: frames written by hand.

use super::*;
use crate::engine::mock_peer;
use crate::engine::reduce::Operands;
use crate::engine::region::Words;
use crate::types::{DType, ReduceOp};

/// Rank 0 with a window of two words, to which rank 1 writes by hand.
struct Scene {
    by_hand: mock_peer::Scene,
    words: Words,
    window: WindowId,
}

impl Scene {
    fn new() -> Scene {
        let mut by_hand = mock_peer::Scene::new();
        let mut words = Words::new(vec![0; 2]);
        let window = by_hand.core.windows.expose(Region::of(&[words.buffer()]));
        Scene { by_hand, words, window }
    }

    fn header(kind: FrameKind, window: u64, token: u64, len: u64) -> Vec<u8> {
        control(kind, Lane::PointToPoint, window, token, len).encode().to_vec()
    }

    fn send(&mut self, bytes: &[u8]) {
        self.by_hand.send(bytes);
    }

    fn signals(&self) -> u64 {
        self.by_hand.core.windows.exposed[&self.window].signals.get(&Rank(1)).copied().unwrap_or(0)
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
fn the_greatest_numbers_are_numbers_like_others() {
    let mut scene = Scene::new();
    for kind in [FrameKind::Announce, FrameKind::Grant, FrameKind::Get, FrameKind::Credit] {
        for lane in [Lane::Collective, Lane::PointToPoint] {
            scene.send(&control(kind, lane, u64::MAX, u64::MAX, u64::MAX).encode());
        }
    }
    assert!(scene.by_hand.core.lost(Rank(1)).is_none());
}

#[test]
fn half_an_element_does_not_hold_up_the_stream() {
    let (mut scene, mut sum) = (Scene::new(), Words::new(vec![0; 2]));
    let region = Region::of(&[sum.buffer()]);
    let arrival = Arrival::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));
    scene.by_hand.core.expect(Rank(1), 5, Placement { region, arrival, owner: Owner::PROTOCOL, filled: 0 });
    scene.send(&Scene::header(FrameKind::Data, 0, 5, 4));
    scene.send(&[1; 4]);
    scene.send(&Scene::header(FrameKind::Signal, scene.window.0, 0, 0));
    assert_eq!((sum.get(), scene.signals()), ([0, 0].as_slice(), 1));
}

#[test]
fn nothing_is_written_to_a_window_that_was_concealed_amid_a_put() {
    let mut scene = Scene::new();
    scene.send(&Scene::header(FrameKind::Put, scene.window.0, 0, 16));
    scene.send(&7u64.to_ne_bytes());
    assert_eq!(scene.words.get(), [7, 0]);
    scene.by_hand.core.conceal(scene.window);
    scene.send(&7u64.to_ne_bytes());
    assert_eq!(scene.words.get(), [7, 0]);
    assert!(scene.by_hand.core.lost(Rank(1)).is_none());
}
