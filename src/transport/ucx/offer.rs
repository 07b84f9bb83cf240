//! Who offers UCX to its peers, and who has to have better than what the system does itself.

use std::path::PathBuf;

use crate::config::{Config, TransportChoice, UcxChoice};
use crate::sync::Arc;
use crate::sys::net;
use crate::sys::ucx::{Context, Reach};

/// UCX as one side offers it to its peer, or why it does not.
pub(crate) type Offer = Result<Arc<Context>, String>;

/// What UCX has to go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// An RDMA device.
    Better,
    /// Anything that is safe.
    Any,
}

/// UCX as the settings let a process use it. Nothing is loaded yet.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    named: Option<PathBuf>,
    packages: Vec<PathBuf>,
    /// What a test has made instead.
    #[cfg(test)]
    given: Option<Arc<Context>>,
}

impl Allowed {
    /// Whether these settings let it, or why they do not. `has_tls` says that nothing may travel in the clear.
    pub(crate) fn by(config: &Config, packages: &[PathBuf], has_tls: bool) -> Result<Allowed, String> {
        let named = match &config.ucx {
            UcxChoice::Off => return Err("its setting `ucx` is off".to_owned()),
            UcxChoice::Auto => None,
            UcxChoice::File(path) => Some(path.clone()),
        };
        match config.transport {
            TransportChoice::Shm | TransportChoice::Tcp => return Err("its setting `transport` is another".to_owned()),
            TransportChoice::Auto if !net::has_rdma_devices() => {
                return Err("its setting `transport` is auto, and its host has no RDMA device".to_owned());
            }
            TransportChoice::Auto | TransportChoice::Ucx => {}
        }
        if has_tls {
            return Err("its setting `tls` forbids what travels in the clear".to_owned());
        }
        Ok(Allowed {
            named,
            packages: packages.to_vec(),
            #[cfg(test)]
            given: None,
        })
    }

    /// This context, and no other.
    #[cfg(test)]
    pub(super) fn given(context: &Arc<Context>) -> Allowed {
        Allowed { named: None, packages: Vec::new(), given: Some(context.clone()) }
    }

    /// Loads the library, which patches functions of the process, for an engine: its thread must never wait for a device.
    pub(crate) fn load(&self) -> Offer {
        self.context(Reach::Host)
    }

    fn context(&self, reach: Reach) -> Offer {
        #[cfg(test)]
        if let Some(context) = &self.given {
            return Ok(context.clone());
        }
        Context::of_process(reach, self.named.as_deref(), &self.packages).map_err(|error| error.to_string())
    }
}

/// What a process with these settings offers to those that move memory themselves, on their own threads.
pub(crate) fn offer(config: &Config, packages: &[PathBuf], has_tls: bool) -> Offer {
    Allowed::by(config, packages, has_tls)?.context(Reach::HostAndDevices)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(settings: &[(&str, &str)], has_tls: bool) -> Result<(), String> {
        let hints: Vec<_> = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let config = Config::resolve_with(&|_| None, &hints).expect("valid settings");
        offer(&config, &[], has_tls).map(drop)
    }

    #[test]
    fn who_offers_no_ucx_says_why() {
        let reason = |settings: &[(&str, &str)], has_tls| offered(settings, has_tls).expect_err("no UCX");
        assert_eq!(reason(&[("transport", "tcp")], false), "its setting `transport` is another");
        assert_eq!(reason(&[("transport", "ucx"), ("ucx", "off")], false), "its setting `ucx` is off");
        assert!(reason(&[("transport", "ucx")], true).starts_with("its setting `tls`"));
        let missing = reason(&[("transport", "ucx"), ("ucx", "/nowhere/libucp.so.0")], false);
        assert!(missing.starts_with("/nowhere/libucp.so.0 cannot be loaded: "), "{missing}");
        if !net::has_rdma_devices() {
            let automatic = reason(&[("ucx", "/nowhere/libucp.so.0")], false);
            assert_eq!(automatic, "its setting `transport` is auto, and its host has no RDMA device");
        }
    }
}
