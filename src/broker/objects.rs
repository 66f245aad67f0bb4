//! Objects: what is too large for the ledger, and what people fetch, in a folder or in a bucket.
//!
//! Knows names and bytes. Must not know what decides that something is kept.

use std::path::PathBuf;
use std::sync::Arc;

use futures::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreExt};
use sha2::{Digest, Sha256};

/// Largest object that the ledger itself holds.
pub const SMALL: usize = 64 << 10;

/// Why objects can't be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("--storage {0} is none: write file:///folder or s3://bucket/prefix")]
    Address(String),
    #[error("--storage {address}: the folder {folder} can't be made: {source}")]
    Folder { address: String, folder: PathBuf, source: std::io::Error },
    #[error("--storage {address} can't be used: {source}")]
    Store { address: String, source: object_store::Error },
    #[error("object {name} can't be {what}: {source}")]
    Object { name: String, what: &'static str, source: object_store::Error },
}

/// A store of objects.
#[derive(Clone, Debug)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
}

impl Objects {
    /// Opens `file:///folder`, synced at every write, or `s3://bucket/prefix` with the credentials of the environment.
    ///
    /// # Errors
    /// When the address is none, or can't be used.
    pub fn open(address: &str) -> Result<Self, Error> {
        let failed = |source| Error::Store { address: address.to_owned(), source };
        if let Some(folder) = address.strip_prefix("file://").filter(|f| f.starts_with('/')) {
            let folder = PathBuf::from(folder);
            std::fs::create_dir_all(&folder).map_err(|source| Error::Folder {
                address: address.to_owned(),
                folder: folder.clone(),
                source,
            })?;
            let store = LocalFileSystem::new_with_prefix(&folder).map_err(failed)?;
            let store = store.with_fsync(true).with_automatic_cleanup(true);
            return Ok(Self { store: Arc::new(store) });
        }
        let bucket = address.strip_prefix("s3://").filter(|b| !b.is_empty());
        let (_, prefix) =
            bucket.map(|b| b.split_once('/').unwrap_or((b, ""))).ok_or_else(|| Error::Address(address.to_owned()))?;
        let store = AmazonS3Builder::from_env().with_url(address).build().map_err(failed)?;
        let prefix = prefix.trim_matches('/');
        let store: Arc<dyn ObjectStore> =
            if prefix.is_empty() { Arc::new(store) } else { Arc::new(PrefixStore::new(store, prefix)) };
        Ok(Self { store })
    }

    /// Writes an object. Once it returns, the object is durable.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), Error> {
        let failed = |source| Error::Object { name: name.to_owned(), what: "written", source };
        self.store.put(&Path::from(name), bytes.into()).await.map_err(failed).map(drop)
    }

    /// Removes an object, if there is one.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        self.remove_at(&Path::from(name)).await
    }

    /// Removes every object whose name begins with a folder's.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn remove_folder(&self, folder: &str) -> Result<(), Error> {
        let mut found = self.store.list(Some(&Path::from(folder)));
        while let Some(object) = found.next().await {
            let failed = |source| Error::Object { name: folder.to_owned(), what: "listed", source };
            self.remove_at(&object.map_err(failed)?.location).await?;
        }
        Ok(())
    }

    async fn remove_at(&self, path: &Path) -> Result<(), Error> {
        match self.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(Error::Object { name: path.to_string(), what: "removed", source }),
        }
    }

    /// Reads an object; `None` if there is none.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn get(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let failed = |source| Error::Object { name: name.to_owned(), what: "read", source };
        match self.store.get(&Path::from(name)).await {
            Ok(found) => Ok(Some(found.bytes().await.map_err(failed)?.to_vec())),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(failed(source)),
        }
    }
}

/// Where all trajectories and all results of a job lie.
#[must_use]
pub fn folders(job: &str) -> [String; 2] {
    [format!("trajectories/{job}"), format!("results/{job}")]
}

/// The digest that names content: SHA-256, in hexadecimal.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Where content of a digest lies.
#[must_use]
pub fn blob(digest: &str) -> String {
    format!("blobs/{}/{digest}", digest.get(..2).unwrap_or("00"))
}

/// Where lines of a trajectory lie, by the number of the first.
#[must_use]
pub fn lines(job: &str, index: u32, generation: u32, first: u64) -> String {
    format!("trajectories/{job}/{index}/{generation}/{first:08}.jsonl")
}

/// Where the result of an episode lies.
#[must_use]
pub fn result(job: &str, index: u32, generation: u32) -> String {
    format!("results/{job}/{index}/{generation}.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_object_comes_back_from_a_folder_and_a_wrong_address_says_what_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let objects = Objects::open(&format!("file://{}/new/folder", folder.path().display())).unwrap();
        let name = blob(&digest(b"x"));
        objects.put(&name, b"x".to_vec()).await.unwrap();
        assert_eq!(objects.get(&name).await.unwrap().as_deref(), Some(&b"x"[..]));
        assert_eq!(objects.get("none").await.unwrap(), None);
        for wrong in ["/folder", "file://folder", "s3://", "gs://bucket"] {
            assert!(Objects::open(wrong).unwrap_err().to_string().contains("write file:///folder or s3://"), "{wrong}");
        }
    }
}
