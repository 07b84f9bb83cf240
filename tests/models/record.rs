//! Records in memory that processes share.

use loom::thread;

use crate::record::{publish, read};
use crate::sync::{Arc, AtomicU64, Ordering};

/// A record of two words.
#[derive(Default)]
struct Place {
    mark: AtomicU64,
    words: [AtomicU64; 2],
}

impl Place {
    fn publish(&self, mark: u64) {
        publish(&self.mark, mark, || self.words.iter().for_each(|word| word.store(mark * 10, Ordering::Relaxed)));
    }

    fn read(&self, mark: u64) -> Option<[u64; 2]> {
        read(&self.mark, mark, || self.words.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }
}

#[test]
fn a_record_is_read_whole_or_not_at_all() {
    loom::model(|| {
        let place = Arc::new(Place::default());
        let written = place.clone();
        let writer = thread::spawn(move || {
            written.publish(1);
            written.publish(2);
        });
        for mark in [1, 2] {
            if let Some(words) = place.read(mark) {
                assert_eq!(words, [mark * 10; 2], "some of another record");
            }
        }
        writer.join().expect("no panic");
        assert_eq!((place.read(1), place.read(2)), (None, Some([20; 2])));
    });
}

#[test]
fn of_two_that_publish_and_look_one_finds_the_other() {
    loom::model(|| {
        let places = [(); 2].map(|()| Arc::new(Place::default()));
        let [own, others] = places.each_ref().map(Arc::clone);
        let other = thread::spawn(move || {
            others.publish(1);
            own.read(1).is_some()
        });
        places[0].publish(1);
        let found = places[1].read(1).is_some();
        assert!(other.join().expect("no panic") || found, "neither has found the other's");
    });
}
