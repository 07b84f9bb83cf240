//! Two sides of a connection, and who comes between them.

use std::net::{Ipv4Addr, TcpListener};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::sign::{SigningKey, SingleCertAndKey};

use super::*;
use crate::sys::fork::testing::{end_at_broken_pipes, holds_in_a_child};
use crate::transport::auth::Identity;
use crate::transport::handshake::{Accepting, Opening};
use crate::types::Rank;

fn secret() -> Secret {
    Secret::new([5; 32])
}

/// As ranks have it that are told nothing but `tls=on`.
fn from_secret() -> Tls {
    Tls::from_secret(&secret()).unwrap()
}

/// As a rank has it that has a certificate.
fn from_files() -> Tls {
    let folder = tempfile::tempdir().unwrap();
    let (root, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut authority = CertificateParams::new(vec![]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_certificate = authority.self_signed(&root).unwrap().pem();
    let own = CertificateParams::new(vec!["rank.example".to_owned()]).unwrap();
    let certificate = own.signed_by(&key, &Issuer::new(authority, root)).unwrap().pem();
    let hints =
        [("tls_certificate", certificate), ("tls_key", key.serialize_pem()), ("tls_ca_file", authority_certificate)];
    let hints = hints.map(|(name, text)| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        (name.to_owned(), path.to_str().unwrap().to_owned())
    });
    Tls::new(&Config::resolve_with(&|_| None, &hints).unwrap(), &secret()).unwrap().unwrap()
}

/// A rank's certificate, or public key, in the hands of who has another private key.
fn stolen(tls: &Tls) -> Tls {
    let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let key = PrivatePkcs8KeyDer::from(key.serialize_der());
    let key: Arc<dyn SigningKey> = ring::sign::any_eddsa_type(&key).unwrap();
    let (mut client, mut server) = ((*tls.client).clone(), (*tls.server).clone());
    let schemes = server.crypto_provider().signature_verification_algorithms.supported_schemes();
    let shown = client.client_auth_cert_resolver.resolve(&[], &schemes).expect("what ranks show");
    let pair = Arc::new(CertifiedKey::new(shown.cert.clone(), key));
    if client.client_auth_cert_resolver.only_raw_public_keys() {
        client.client_auth_cert_resolver = Arc::new(AlwaysResolvesClientRawPublicKeys::new(pair.clone()));
        server.cert_resolver = Arc::new(AlwaysResolvesServerRawPublicKeys::new(pair));
    } else {
        client.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(pair.clone()));
        server.cert_resolver = Arc::new(SingleCertAndKey::from(pair));
    }
    Tls { client: Arc::new(client), server: Arc::new(server) }
}

/// The sockets of a new connection, which do not block: that which opened it and that which accepted it.
fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let open = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    for socket in [&open, &accepted] {
        socket.set_nonblocking(true).unwrap();
    }
    [open, accepted]
}

/// The ends of a new connection: that which opened it and that which accepted it.
fn connection(opener: &Tls, acceptor: &Tls) -> [Stream; 2] {
    let [open, accepted] = sockets();
    [Stream::open(open, Some(opener)), Stream::accept(accepted, Some(acceptor))]
}

/// Sends a byte each way; what that fails with, on the side that minds.
fn meet(ends: &mut [Stream; 2]) -> io::Result<()> {
    let (mut sent, mut received) = ([false; 2], [false; 2]);
    while received != [true; 2] {
        for (side, end) in ends.iter_mut().enumerate() {
            let written = if sent[side] { end.flush() } else { end.write(b"x").map(|_| sent[side] = true) };
            written.or_else(|error| if is_passing(&error) { Ok(()) } else { Err(error) })?;
            match end.read(&mut [0]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => received[side] = true,
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn both_ends_of_a_session_have_what_no_other_session_has() {
    for tls in [from_secret(), from_files()] {
        let bindings = [(); 2].map(|()| {
            let mut ends = connection(&tls, &tls);
            meet(&mut ends).unwrap();
            let [one, other] = ends.map(|end| end.binding());
            assert_eq!(one, other);
            one
        });
        assert_ne!(bindings[0], bindings[1]);
    }
}

#[test]
fn what_a_rank_shows_is_worth_nothing_without_its_key() {
    for tls in [from_secret(), from_files()] {
        let thief = stolen(&tls);
        for (opener, acceptor) in [(&tls, &thief), (&thief, &tls)] {
            let error = meet(&mut connection(opener, acceptor)).expect_err("it has another key");
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
    }
}

#[test]
fn that_the_other_side_is_gone_is_an_error_and_no_signal() {
    let is_told = |make: &dyn Fn() -> [Stream; 2]| {
        holds_in_a_child(|| {
            let [mut near, far] = make();
            end_at_broken_pipes();
            drop(far);
            loop {
                match near.write_vectored(&[IoSlice::new(b"some"), IoSlice::new(b"thing")]) {
                    Err(error) if !is_passing(&error) => {
                        return matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
                    }
                    _ => {}
                }
            }
        })
    };
    assert!(is_told(&|| sockets().map(Stream::plain)));
    assert!(is_told(&|| {
        let mut ends = connection(&from_secret(), &from_secret());
        meet(&mut ends).unwrap();
        ends
    }));
}

/// Passes on what has come.
fn pass(from: &mut Stream, to: &mut Stream) {
    let mut piece = [0; 256];
    if let Ok(count @ 1..) = from.read(&mut piece) {
        assert_eq!(to.write(&piece[..count]).unwrap(), count, "there is room for so little");
    }
}

#[test]
fn a_relay_that_has_a_key_but_not_the_secret_cannot_pass_proofs_on() {
    for tls in [from_secret(), from_files()] {
        let (mut near, mut far) = (connection(&tls, &tls), connection(&tls, &tls));
        meet(&mut near).unwrap();
        meet(&mut far).unwrap();
        let ([mut opener, mut heard], [mut said, mut acceptor]) = (near, far);
        let identity = |me| Identity { comm: [1; 16], me: Rank(me), size: 2, secret: secret() };
        let (mut opening, mut accepting) = (Opening::new(identity(0), Rank(1)), Accepting::new(identity(1)));
        let refused = loop {
            match accepting.drive(&mut acceptor) {
                Ok(None) => {}
                Ok(Some(rank)) => panic!("rank {rank} has come through the relay"),
                Err(down) => break down,
            }
            pass(&mut said, &mut heard);
            assert_eq!(opening.drive(&mut opener), Ok(false));
            pass(&mut heard, &mut said);
            std::thread::yield_now();
        };
        assert!(refused.cause.contains("does not know the job's secret"), "{refused:?}");
    }
}
