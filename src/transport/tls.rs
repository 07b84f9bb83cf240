//! TLS 1.3 over a connection that may or may not block, and a connection without TLS with the same interface.
//!
//! Both sides authenticate: by certificates that an authority has signed, or by a key made from the communicator's secret (a
//! raw public key, RFC 7250), which needs no files. Names in certificates are not checked, because ranks are known by their
//! numbers and move between hosts. A peer with a valid certificate must still prove in the session that it knows the secret
//! ([`auth`](super::auth)).

use std::fmt;
use std::io::{self, BufRead, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};
use serde::{Deserialize, Serialize};

use crate::config::{self, Config};
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::socket;
use crate::transport::auth::{Binding, Secret};
use crate::transport::handshake::{Channel, is_passing};

/// The protection of a communicator's connections: the same for all of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Protection {
    /// No TLS: connections are authenticated only.
    None,
    /// TLS with keys made from the secret.
    Secret,
    /// TLS with certificates.
    Certificates,
}

impl Protection {
    /// The protection that the settings ask for.
    pub(crate) fn of(config: &Config) -> Protection {
        match config.tls {
            config::Switch::Off => Protection::None,
            _ if files(config).iter().any(|(_, file)| file.is_some()) => Protection::Certificates,
            config::Switch::On => Protection::Secret,
            config::Switch::Auto => Protection::None,
        }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protection::None => "no TLS",
            Protection::Secret => "TLS with keys from the secret",
            Protection::Certificates => "TLS with certificates",
        })
    }
}

/// The configuration of this process's side of TLS connections.
#[derive(Clone)]
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// The configuration that the settings ask for; none for no TLS. `secret` is the communicator's.
    pub(crate) fn new(config: &Config, secret: &Secret) -> Result<Option<Tls>, InitError> {
        match Protection::of(config) {
            Protection::None => Ok(None),
            Protection::Secret => Tls::from_secret(secret).map(Some).map_err(|error| refused("tls", &error)),
            Protection::Certificates => Tls::from_files(config).map(Some),
        }
    }

    fn from_secret(secret: &Secret) -> Result<Tls, rustls::Error> {
        let provider = Arc::new(ring::default_provider());
        let seed = secret.derive("ncclx_rs tls key", &[]);
        let key = PrivatePkcs8KeyDer::from([ED25519_PKCS8, seed.bytes()].concat());
        let key = ring::sign::any_eddsa_type(&key)?;
        let public = key.public_key().expect("an Ed25519 key has a public part").into_owned();
        let pair = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key));
        let verifier = Arc::new(SameKey { public, algorithms: provider.signature_verification_algorithms });
        let client = client(&provider)?
            .with_custom_certificate_verifier(verifier.clone())
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(pair.clone())));
        let server = server(&provider)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(pair)));
        Ok(Tls::of(client, server))
    }

    fn from_files(config: &Config) -> Result<Tls, InitError> {
        let [certificate, key, authority] = files(config).map(|(name, file)| {
            file.ok_or_else(|| {
                InitError::Config(format!(
                    "{name} is not set: expected all of tls_certificate, tls_key and tls_ca_file, or none"
                ))
            })
        });
        let (certificate, key, authority) = (certificate?, key?, authority?);
        let chain = certificates("tls_certificate", certificate)?;
        let key =
            PrivateKeyDer::from_pem_file(key).map_err(|error| refused("tls_key", &format!("`{key}`: {error}")))?;
        let mut roots = RootCertStore::empty();
        for root in certificates("tls_ca_file", authority)? {
            roots.add(root).map_err(|error| refused("tls_ca_file", &format!("`{authority}`: {error}")))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| refused("tls_ca_file", &error))?;
        let algorithms = provider.signature_verification_algorithms;
        let own = |error: rustls::Error| refused("tls_certificate with tls_key", &error);
        let client = client(&provider)
            .map_err(own)?
            .with_custom_certificate_verifier(Arc::new(AnyName { roots, algorithms }))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(own)?;
        let server = server(&provider)
            .map_err(own)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(own)?;
        Ok(Tls::of(client, server))
    }

    fn of(mut client: ClientConfig, mut server: ServerConfig) -> Tls {
        client.enable_sni = false;
        // No session is resumed: connections last as long as the communicator.
        client.resumption = Resumption::disabled();
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Tls { client: Arc::new(client), server: Arc::new(server) }
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(..)")
    }
}

/// A TCP connection, with TLS or without.
///
/// Reading and writing drive the handshake too, and end early with `WouldBlock` where the socket does. A failure of TLS
/// itself has the kind `InvalidData`; its text says what is wrong with the other side.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    tls: Option<Box<Connection>>,
}

impl Stream {
    /// A connection without TLS.
    pub(crate) fn plain(socket: TcpStream) -> Self {
        Stream { socket, tls: None }
    }

    /// The side that opened the connection.
    pub(crate) fn open(socket: TcpStream, tls: Option<&Tls>) -> Self {
        let connection = tls.map(|tls| {
            let name = ServerName::try_from("ncclx-rs").expect("it is a name");
            let client = ClientConnection::new(tls.client.clone(), name).expect("a configuration that fits TLS 1.3");
            Box::new(client.into())
        });
        Stream { socket, tls: connection }
    }

    /// The side that accepted the connection.
    pub(crate) fn accept(socket: TcpStream, tls: Option<&Tls>) -> Self {
        Stream { socket, tls: tls.map(Stream::accepting) }
    }

    fn accepting(tls: &Tls) -> Box<Connection> {
        let server = ServerConnection::new(tls.server.clone()).expect("a configuration that fits TLS 1.3");
        Box::new(server.into())
    }

    /// The socket, to watch and to configure.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Continues with TLS, as the side that accepted the connection.
    pub(crate) fn protect(&mut self, tls: &Tls) {
        self.tls = Some(Stream::accepting(tls));
    }

    /// Whether TLS protects it.
    pub(crate) fn is_protected(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether TLS holds bytes that the socket has not taken.
    pub(crate) fn holds_bytes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Whether TLS protects it.
    pub(crate) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether TLS holds received bytes that the socket no longer has.
    pub(crate) fn has_more(&mut self) -> bool {
        self.tls.as_mut().is_some_and(|tls| tls.reader().fill_buf().is_ok_and(|bytes| !bytes.is_empty()))
    }

    /// Whether the other side has closed a connection on which it sends nothing but TLS's own records.
    pub(crate) fn has_ended(&mut self) -> io::Result<bool> {
        if self.tls.is_none() {
            return socket::has_ended(self.as_fd());
        }
        match self.read(&mut [0]) {
            Ok(count) => Ok(count == 0),
            Err(error) if is_passing(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Channel for Stream {
    fn binding(&self) -> Binding {
        let Some(tls) = &self.tls else { return [0; 32] };
        let exported = tls.export_keying_material([0; 32], b"EXPORTER-Channel-Binding", None);
        exported.expect("the handshake is over: a byte of the other side has come")
    }

    fn begins_with_challenge(&self) -> bool {
        self.tls.is_none()
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.socket.read(into) };
        loop {
            // If this fails, a read reports why, after the bytes that came before.
            let _ = push(tls, &self.socket);
            match tls.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Frames carry their lengths and ranks say goodbye, so a truncated connection is noticed anyway.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                outcome => return outcome,
            }
            tls.read_tls(&mut self.socket)?;
            if let Err(error) = tls.process_new_packets() {
                // Sends the alert to the other side, if the socket takes it.
                let _ = push(tls, &self.socket);
                return Err(io::Error::new(ErrorKind::InvalidData, words(&error)));
            }
        }
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if self.tls.is_none() {
            return self.socket.read_vectored(into);
        }
        let first = into.iter_mut().find(|part| !part.is_empty());
        first.map_or(Ok(0), |part| self.read(part))
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return socket::write(self.socket.as_fd(), bytes) };
        push(tls, &self.socket)?;
        if tls.wants_write() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = tls.writer().write_vectored(bytes)?;
        push(tls, &self.socket)?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            push(tls, &self.socket)?;
        }
        if self.holds_bytes() { Err(ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }
}

/// A socket that is written to by [`socket::write`].
struct Written<'a>(&'a TcpStream);

impl Write for Written<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        socket::write(self.0.as_fd(), bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes TLS's bytes, as far as the socket takes them.
fn push(tls: &mut Connection, socket: &TcpStream) -> io::Result<()> {
    while tls.wants_write() {
        match tls.write_tls(&mut Written(socket)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Accepts any certificate that an authority has signed for a server.
#[derive(Debug)]
struct AnyName {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(only_tls13())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Accepts the key that this rank has too, and no other.
#[derive(Debug)]
struct SameKey {
    public: SubjectPublicKeyInfoDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl SameKey {
    fn check(&self, theirs: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let same = theirs.as_ref() == self.public.as_ref();
        if same { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }

    fn check_signature(
        &self,
        message: &[u8],
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature_with_raw_key(message, &self.public, signed, &self.algorithms)
    }
}

macro_rules! raw_key_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _key: &CertificateDer<'_>,
            _signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(only_tls13())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            _key: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            self.check_signature(message, signed)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for SameKey {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(key).map(|()| ServerCertVerified::assertion())
    }

    raw_key_signatures!();
}

impl ClientCertVerifier for SameKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(key).map(|()| ClientCertVerified::assertion())
    }

    raw_key_signatures!();
}

fn client(
    provider: &Arc<CryptoProvider>,
) -> Result<rustls::client::danger::DangerousClientConfigBuilder, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(provider.clone());
    Ok(builder.with_protocol_versions(&[&rustls::version::TLS13])?.dangerous())
}

fn server(
    provider: &Arc<CryptoProvider>,
) -> Result<rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier>, rustls::Error> {
    ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&rustls::version::TLS13])
}

/// The error of versions that no side offers.
fn only_tls13() -> rustls::Error {
    rustls::Error::General("no other version than TLS 1.3 is spoken".to_owned())
}

/// The files of certificates, by option.
fn files(config: &Config) -> [(&'static str, Option<&str>); 3] {
    [
        ("tls_certificate", config.tls_certificate.as_deref()),
        ("tls_key", config.tls_key.as_deref()),
        ("tls_ca_file", config.tls_ca_file.as_deref()),
    ]
}

fn certificates(name: &str, file: &str) -> Result<Vec<CertificateDer<'static>>, InitError> {
    let read = || CertificateDer::pem_file_iter(file)?.collect::<Result<Vec<_>, _>>();
    match read() {
        Ok(found) if found.is_empty() => Err(refused(name, &format!("`{file}` holds no certificate"))),
        Ok(found) => Ok(found),
        Err(error) => Err(refused(name, &format!("`{file}`: {error}"))),
    }
}

fn refused(option: &str, cause: &dyn fmt::Display) -> InitError {
    InitError::Config(format!("{option}: {cause}"))
}

/// What is wrong with the other side, in words.
fn words(error: &rustls::Error) -> String {
    use CertificateError as Bad;
    let text = match error {
        rustls::Error::InvalidCertificate(bad) => match bad {
            Bad::UnknownIssuer | Bad::BadSignature => {
                "its certificate is not signed by an authority that this rank trusts (tls_ca_file)"
            }
            Bad::Expired | Bad::ExpiredContext { .. } => "its certificate has expired",
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => "its certificate is not valid yet",
            Bad::ApplicationVerificationFailure => "it does not know the secret",
            _ => return format!("its certificate is not accepted: {bad}"),
        },
        rustls::Error::NoCertificatesPresented => "it presents no certificate",
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::UnknownCA => "it does not trust the authority of this rank's certificate",
            AlertDescription::CertificateExpired => "it says that this rank's certificate has expired",
            alert => return format!("it refuses this rank's side of TLS: {alert:?}"),
        },
        rustls::Error::InvalidMessage(_) => "it does not speak TLS",
        _ => return format!("TLS failed: {error}"),
    };
    text.to_owned()
}

/// The bytes before an Ed25519 key in PKCS #8 (RFC 8410, section 7).
const ED25519_PKCS8: &[u8] = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

#[cfg(test)]
mod tests;
