//! Callers that say nothing.

use super::*;
use crate::sys::{limits, socket};

#[test]
fn a_thousand_silent_callers_delay_a_rank_by_seconds() {
    limits::raise_descriptors();
    for tls in ["off", "on"] {
        let [mut sender, mut receiver] = [0, 1].map(|me| transport(me, &config(tls, "1")));
        let address = (Ipv4Addr::LOCALHOST, receiver.port).into();
        let _silent: Vec<_> = (0..1000).map(|_| socket::begin_tcp(address, None).unwrap()).collect();
        let begun = Instant::now();
        let _streams = opened(&mut sender, &mut receiver, Detour::Impossible);
        // With the time that a silent caller has while nobody waits, it would be half a minute.
        assert!(begun.elapsed() < Duration::from_secs(10), "TLS {tls}: {:?}", begun.elapsed());
    }
}
