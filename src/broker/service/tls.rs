//! TLS of the broker's port: a certificate that may change while connections are open.
//!
//! Knows certificates and sockets. Must not know what is said over them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(10);
/// Longest that a client may take to say hello.
const HELLO: Duration = Duration::from_secs(10);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the certificate {path} can't be used: {why}")]
    Certificate { path: PathBuf, why: String },
    #[error("TLS can't be set up: {0}")]
    Rustls(#[from] rustls::Error),
}

/// The certificate of two files, read again when they change.
#[derive(Debug)]
pub struct Certificate {
    chain: PathBuf,
    key: PathBuf,
    current: RwLock<(Vec<u8>, Arc<CertifiedKey>)>,
}

impl Certificate {
    /// Reads it.
    ///
    /// # Errors
    /// Names the file.
    pub fn open(chain: &Path, key: &Path) -> Result<Arc<Self>, Error> {
        let current = RwLock::new(Self::read(chain, key)?);
        Ok(Arc::new(Self { chain: chain.to_path_buf(), key: key.to_path_buf(), current }))
    }

    fn read(chain: &Path, key: &Path) -> Result<(Vec<u8>, Arc<CertifiedKey>), Error> {
        let failed = |path: &Path, why: &dyn std::fmt::Display| Error::Certificate {
            path: path.to_path_buf(),
            why: why.to_string(),
        };
        let mut text = std::fs::read(chain).map_err(|e| failed(chain, &e))?;
        let key_text = std::fs::read(key).map_err(|e| failed(key, &e))?;
        let certificates: Vec<CertificateDer<'static>> =
            CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|e| failed(chain, &e))?;
        if certificates.is_empty() {
            return Err(failed(chain, &"it holds no certificate"));
        }
        let private = PrivateKeyDer::from_pem_slice(&key_text).map_err(|e| failed(key, &e))?;
        let signing = ring::sign::any_supported_type(&private).map_err(|e| failed(key, &e))?;
        let certified = CertifiedKey::new(certificates, signing);
        certified.keys_match().map_err(|e| failed(key, &format!("it isn't the certificate's key: {e}")))?;
        text.extend(key_text);
        Ok((text, Arc::new(certified)))
    }

    /// Reads the files again. Files that can't be used (half written, say) leave the certificate as it is.
    pub fn refresh(&self) {
        match Self::read(&self.chain, &self.key) {
            Ok(fresh) => {
                let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                if current.0 != fresh.0 {
                    tracing::info!("the certificate {} is a new one", self.chain.display());
                    *current = fresh;
                }
            }
            Err(error) => tracing::warn!("{error}; the one before stays in use"),
        }
    }

    /// Looks at the files for ever.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            self.refresh();
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).1.clone())
    }
}

/// Connections of a listener, each after its TLS hello. A client that says nothing is in nobody's way.
///
/// # Errors
/// When TLS can't be set up.
pub fn accept(
    listener: TcpListener,
    certificate: Arc<Certificate>,
) -> Result<ReceiverStream<std::io::Result<TlsStream<TcpStream>>>, Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let (sender, receiver) = mpsc::channel(64);
    tokio::spawn(async move {
        loop {
            let socket = tokio::select! {
                accepted = listener.accept() => accepted,
                () = sender.closed() => return,
            };
            let Ok((socket, _)) = socket else {
                // Too many open files, say: the connections that are there go on.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (acceptor, sender) = (acceptor.clone(), sender.clone());
            tokio::spawn(async move {
                let _ = socket.set_nodelay(true);
                if let Ok(Ok(stream)) = tokio::time::timeout(HELLO, acceptor.accept(socket)).await {
                    let _ = sender.send(Ok(stream)).await;
                }
            });
        }
    });
    Ok(ReceiverStream::new(receiver))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, parts: (bool, bool)) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        if parts.0 {
            std::fs::write(folder.join("tls.crt"), made.cert.pem()).unwrap();
        }
        if parts.1 {
            std::fs::write(folder.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
        }
    }

    #[test]
    fn a_new_certificate_is_taken_and_half_of_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (chain, key) = (folder.path().join("tls.crt"), folder.path().join("tls.key"));
        write(folder.path(), (true, true));
        let certificate = Certificate::open(&chain, &key).unwrap();
        let current = || certificate.current.read().unwrap().1.cert.clone();
        let first = current();
        certificate.refresh();
        assert_eq!(current(), first);
        // Another certificate without its key: the one before stays.
        write(folder.path(), (true, false));
        certificate.refresh();
        assert_eq!(current(), first);
        let why = Certificate::open(&chain, &key).unwrap_err().to_string();
        assert!(why.contains("tls.key can't be used: it isn't the certificate's key"), "{why}");
        write(folder.path(), (true, true));
        certificate.refresh();
        assert_ne!(current(), first);
    }
}
