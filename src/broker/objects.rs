//! Objects: what is too large for the ledger, and what people fetch, in a folder or in a bucket.
//!
//! Knows names and bytes. Must not know what decides that something is kept.

use std::error::Error as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig};
use sha2::{Digest, Sha256};

use crate::hex::hex;

/// Largest object that the ledger itself holds.
pub const SMALL: usize = 64 << 10;
/// How long a request to a bucket is tried again: a server that starts anew is back by then, and who waits for the reply has
/// not given up.
const TRIED: Duration = Duration::from_secs(15);
/// Longest that one try may take.
const TRY: Duration = Duration::from_secs(30);
/// Longest that a request may take that nobody should wait for.
const AT_ONCE: Duration = Duration::from_secs(10);
/// Objects of a bucket that are removed at the same time.
const TOGETHER: usize = 16;
/// Variables of a process that a message must never show.
const HIDDEN: [&str; 3] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];

/// Why objects can't be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("--storage {0} is none: write file:///folder or s3://bucket/prefix")]
    Address(String),
    #[error("--storage {address}: the folder {folder} can't be made: {source}")]
    Folder { address: String, folder: PathBuf, source: std::io::Error },
    #[error("--storage {address} can't be used: {source}")]
    Store { address: String, source: object_store::Error },
    #[error("--storage-endpoint {0} is none: write https://host or http://host:port")]
    Endpoint(String),
    #[error("--storage-endpoint and --storage-region are for --storage s3://bucket/prefix")]
    Folders,
    #[error(
        "--storage {0}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the service \
         account an identity of its own (AWS_ROLE_ARN with AWS_WEB_IDENTITY_TOKEN_FILE, or EKS Pod Identity)"
    )]
    Credentials(String),
    #[error("--storage {address}: {why}")]
    Bucket { address: String, why: String },
    #[error("object {name} can't be {what}: {why}")]
    Object { name: String, what: &'static str, why: String },
}

/// Where a bucket is, as its messages name it.
#[derive(Clone, Debug)]
struct Bucket {
    address: String,
    name: String,
    endpoint: Option<String>,
    region: Option<String>,
    /// What no message may show.
    hidden: Arc<Vec<String>>,
}

/// A store of objects.
#[derive(Clone, Debug)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    /// The same, where nothing is tried a second time.
    at_once: Arc<dyn ObjectStore>,
    bucket: Option<Bucket>,
    failing: Arc<Mutex<Option<String>>>,
}

impl Objects {
    /// Opens `file:///folder`, synced at every write, or `s3://bucket/prefix` with the credentials of the environment. What
    /// `endpoint` says is asked instead of Amazon. The bucket isn't asked yet: `check` does.
    ///
    /// # Errors
    /// When the address is none, or can't be used.
    pub fn open(address: &str, endpoint: Option<&str>, region: Option<&str>) -> Result<Self, Error> {
        if let Some(folder) = address.strip_prefix("file://").filter(|f| f.starts_with('/')) {
            if endpoint.is_some() || region.is_some() {
                return Err(Error::Folders);
            }
            let folder = PathBuf::from(folder);
            std::fs::create_dir_all(&folder).map_err(|source| Error::Folder {
                address: address.to_owned(),
                folder: folder.clone(),
                source,
            })?;
            let store = LocalFileSystem::new_with_prefix(&folder)
                .map_err(|source| Error::Store { address: address.to_owned(), source })?;
            let store: Arc<dyn ObjectStore> = Arc::new(store.with_fsync(true).with_automatic_cleanup(true));
            return Ok(Self { at_once: store.clone(), store, bucket: None, failing: Arc::default() });
        }
        let (name, prefix) = bucket(address)?;
        if let Some(wrong) = endpoint.filter(|e| !is_endpoint(e)) {
            return Err(Error::Endpoint(shown(wrong)));
        }
        if !identified(&variable) {
            return Err(Error::Credentials(address.to_owned()));
        }
        let open = |retry, longest| {
            let store = s3(name, endpoint, region, retry, longest)
                .build()
                .map_err(|source| Error::Store { address: address.to_owned(), source })?;
            let store: Arc<dyn ObjectStore> =
                if prefix.is_empty() { Arc::new(store) } else { Arc::new(PrefixStore::new(store, prefix)) };
            Ok::<_, Error>(store)
        };
        let backoff = BackoffConfig { max_backoff: Duration::from_secs(2), ..BackoffConfig::default() };
        let retry = RetryConfig { backoff, max_retries: 20, retry_timeout: TRIED };
        let never = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let owned = |said: Option<&str>| said.map(str::to_owned);
        let bucket = Bucket {
            address: address.to_owned(),
            name: name.to_owned(),
            endpoint: owned(endpoint),
            region: owned(region),
            hidden: Arc::new(HIDDEN.into_iter().filter_map(variable).filter(|v| v.len() >= 4).collect()),
        };
        let untried = format!("--storage {address}: the bucket wasn't asked yet");
        Ok(Self {
            store: open(retry, TRY)?,
            at_once: open(never, AT_ONCE)?,
            bucket: Some(bucket),
            failing: Arc::new(Mutex::new(Some(untried))),
        })
    }

    /// Why the bucket can't be used, if something failed since it last could.
    #[must_use]
    pub fn failing(&self) -> Option<String> {
        self.failed().clone()
    }

    fn failed(&self) -> MutexGuard<'_, Option<String>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does once to a bucket all that is done to one: write, read, list, remove. Nothing is tried again. A folder needs no
    /// check, since it was made.
    ///
    /// # Errors
    /// When one of these fails.
    pub async fn check(&self) -> Result<(), Error> {
        let Some(bucket) = &self.bucket else { return Ok(()) };
        // Beside the folders that `folders` and `blob` name, so that nobody meets it.
        let (folder, path) = (Path::from("check"), Path::from("check/written"));
        let tried = async {
            let store = &self.at_once;
            store.put(&path, Vec::from(*b"kernelfleet").into()).await?;
            store.get(&path).await?.bytes().await?;
            store.list(Some(&folder)).try_next().await?;
            store.delete(&path).await
        };
        let result = tried.await.map_err(|e| bucket.why(&e));
        *self.failed() = result.as_ref().err().map(|why| format!("--storage {}: {why}", bucket.address));
        result.map_err(|why| Error::Bucket { address: bucket.address.clone(), why })
    }

    /// The error of one object. What a bucket's says is remembered until a check finds that it is over.
    fn error(&self, name: &str, what: &'static str, source: &object_store::Error) -> Error {
        let why = match &self.bucket {
            None => source.to_string(),
            Some(bucket) => {
                let why = bucket.why(source);
                *self.failed() = Some(format!("--storage {}: {why}", bucket.address));
                why
            }
        };
        Error::Object { name: name.to_owned(), what, why }
    }

    /// Writes an object. Once it returns, the object is durable.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), Error> {
        // Nothing is asked for that not every server has: no precondition, no tag, no checksum but the signature's.
        self.store.put(&Path::from(name), bytes.into()).await.map_err(|e| self.error(name, "written", &e)).map(drop)
    }

    /// Removes objects, where there are any, without a second try. All that was asked for has been answered, or will not be,
    /// when it returns.
    ///
    /// # Errors
    /// The first that there was.
    pub async fn remove(&self, names: &[String]) -> Result<(), Error> {
        let paths: Vec<Path> = names.iter().map(|name| Path::from(name.as_str())).collect();
        let each = futures::stream::iter(paths).map(|path| self.remove_at(&self.at_once, path));
        each.buffer_unordered(self.together()).collect::<Vec<_>>().await.into_iter().collect()
    }

    /// Removes every object whose name begins with a folder's.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn remove_folder(&self, folder: &str) -> Result<(), Error> {
        let found = self.store.list(Some(&Path::from(folder)));
        found
            .map_err(|e| self.error(folder, "listed", &e))
            .try_for_each_concurrent(self.together(), |object| self.remove_at(&self.store, object.location))
            .await
    }

    const fn together(&self) -> usize {
        if self.bucket.is_some() { TOGETHER } else { 1 }
    }

    async fn remove_at(&self, store: &Arc<dyn ObjectStore>, path: Path) -> Result<(), Error> {
        match store.delete(&path).await {
            Ok(()) => Ok(()),
            Err(error) if absent(&error, self.bucket.is_some()) => Ok(()),
            Err(error) => Err(self.error(path.as_ref(), "removed", &error)),
        }
    }

    /// Reads an object; `None` if there is none.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn get(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let read = async { self.store.get(&Path::from(name)).await?.bytes().await };
        match read.await {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(error) if absent(&error, self.bucket.is_some()) => Ok(None),
            Err(error) => Err(self.error(name, "read", &error)),
        }
    }
}

/// A client of a bucket. What isn't said here is the environment's.
fn s3(
    bucket: &str,
    endpoint: Option<&str>,
    region: Option<&str>,
    retry: RetryConfig,
    longest: Duration,
) -> AmazonS3Builder {
    let options = ClientOptions::new().with_timeout(longest);
    let open = endpoint.is_some_and(|e| e.starts_with("http://"));
    let mut builder = AmazonS3Builder::from_env()
        .with_client_options(options)
        .with_allow_http(open || variable("AWS_ALLOW_HTTP").is_some_and(|v| v == "true"))
        .with_bucket_name(bucket)
        .with_retry(retry)
        // Many servers can't remove a list of objects at once.
        .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true");
    if let Some(endpoint) = endpoint {
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    // A file that became a Secret often ends with a line's end, which no signature may have.
    if let (Some(key), Some(secret)) = (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) {
        builder = builder.with_access_key_id(key).with_secret_access_key(secret);
    }
    builder
}

/// A variable of the process that holds something, without the space around it.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// Whether there is something to sign with. What a node would give to whoever asks for it isn't meant for a pod.
fn identified(variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let all = |names: &[&str]| names.iter().all(|name| variable(name).is_some());
    all(&["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
        || all(&["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"])
        || all(&["AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"])
        || all(&["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"])
}

/// An address as a message may show it: no key is in one that should be there, but somebody may have written it.
fn shown(address: &str) -> String {
    match address.rsplit_once('@') {
        Some((before, after)) => {
            let scheme = before.split_once("://").map_or("", |(scheme, _)| scheme);
            format!("{scheme}://***@{after}")
        }
        None => address.to_owned(),
    }
}

/// Bucket and prefix of `s3://bucket/prefix`.
fn bucket(address: &str) -> Result<(&str, &str), Error> {
    let wrong = || Error::Address(shown(address));
    let path = address.strip_prefix("s3://").ok_or_else(wrong)?;
    let (name, prefix) = path.split_once('/').unwrap_or((path, ""));
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || !name.chars().all(letter) {
        return Err(wrong());
    }
    Ok((name, prefix.trim_matches('/')))
}

fn is_endpoint(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    host.is_some_and(|h| !h.is_empty() && !h.starts_with('/') && !h.contains(['@', '?', '#']))
}

/// Whether it is said of an object that it isn't there. Servers answer 404 for a bucket too, and some for a key that they
/// don't know: who took that for an object that is gone would forget what is still there.
fn absent(error: &object_store::Error, bucket: bool) -> bool {
    match error {
        object_store::Error::NotFound { source, .. } => {
            !bucket || source.to_string().contains("<Code>NoSuchKey</Code>")
        }
        _ => false,
    }
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(from)?;
    rest.split_once(to).map(|(found, _)| found)
}

impl Bucket {
    /// What a failure comes to, with the setting that it is about. A server's answer may quote what was signed, so no more
    /// than its code and its message is shown, and neither key nor secret.
    fn why(&self, error: &object_store::Error) -> String {
        let text = error.to_string();
        let code = between(&text, "<Code>", "</Code>");
        let message = between(&text, "<Message>", "</Message>").unwrap_or_default();
        let message = [("&#34;", "\""), ("&quot;", "\""), ("&#39;", "'"), ("&apos;", "'"), ("&amp;", "&")]
            .into_iter()
            .fold(message.to_owned(), |message, (escaped, plain)| message.replace(escaped, plain));
        let status = between(&text, "non-2xx status code: ", ":");
        let said = match (code, status) {
            (Some(code), _) if message.is_empty() => code.to_owned(),
            (Some(code), _) => format!("{code}: {message}"),
            (None, Some(status)) => status.to_owned(),
            (None, None) => root(error),
        };
        let Self { address, name, .. } = self;
        let region = match &self.region {
            Some(region) => format!("--storage-region {region}"),
            None => "--storage-region".to_owned(),
        };
        let refused = status.is_some_and(|s| s.starts_with("401") || s.starts_with("403"));
        let why = match code {
            Some("NoSuchBucket") => {
                format!("there is no bucket {name} ({said}); make it, or correct the address")
            }
            Some(
                "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "InvalidToken"
                | "ExpiredToken"
                | "XAdminUserNotFound"
                | "TokenRefreshRequired",
            ) => {
                format!(
                    "the server doesn't know this key or its secret ({said}); correct AWS_ACCESS_KEY_ID and \
                     AWS_SECRET_ACCESS_KEY"
                )
            }
            Some(
                "PermanentRedirect"
                | "TemporaryRedirect"
                | "AuthorizationHeaderMalformed"
                | "IllegalLocationConstraintException",
            ) => {
                format!("the bucket is in another region ({said}); correct {region}")
            }
            _ if text.contains("Received redirect without LOCATION") => {
                format!("the bucket is in another region; correct {region}")
            }
            _ if refused => format!(
                "the server refuses the key ({said}); it has to be allowed to list the bucket {name} and to get, put and delete \
                 objects below {address}"
            ),
            Some(_) => format!("the server says {said}"),
            None if status.is_some() => format!("{} answers {said}", self.server()),
            None => format!("{} can't be reached: {said}", self.server()),
        };
        self.hidden.iter().fold(why, |why, secret| why.replace(secret.as_str(), "***"))
    }

    /// The setting that says who is asked.
    fn server(&self) -> String {
        match (&self.endpoint, &self.region) {
            (Some(endpoint), _) => format!("--storage-endpoint {endpoint}"),
            (None, Some(region)) => format!("Amazon's S3 in --storage-region {region}"),
            (None, None) => "Amazon's S3".to_owned(),
        }
    }
}

/// What is at the bottom of an error.
fn root(error: &object_store::Error) -> String {
    let mut last = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        last = error.to_string();
        next = error.source();
    }
    last
}

/// Where all trajectories and all results of a job lie.
#[must_use]
pub fn folders(job: &str) -> [String; 2] {
    [format!("trajectories/{job}"), format!("results/{job}")]
}

/// The digest that names content: SHA-256, in hexadecimal.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
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
        let objects = Objects::open(&format!("file://{}/new/folder", folder.path().display()), None, None).unwrap();
        let name = blob(&digest(b"x"));
        objects.put(&name, b"x".to_vec()).await.unwrap();
        assert_eq!(objects.get(&name).await.unwrap().as_deref(), Some(&b"x"[..]));
        assert_eq!(objects.get("none").await.unwrap(), None);
        objects.check().await.unwrap();
        assert_eq!(objects.failing(), None);
        for wrong in ["/folder", "file://folder", "s3://", "s3:///prefix", "s3://b c/d", "gs://bucket"] {
            let error = Objects::open(wrong, None, None).unwrap_err().to_string();
            assert!(error.contains("write file:///folder or s3://"), "{wrong}");
        }
        let region = Objects::open(&format!("file://{}", folder.path().display()), None, Some("eu-1")).unwrap_err();
        assert!(region.to_string().contains("--storage-region are for --storage s3://"));
    }

    #[test]
    fn a_key_in_an_address_is_refused_and_not_shown() {
        for address in ["s3://key:secret@bucket/prefix", "s3://secret@bucket"] {
            let error = Objects::open(address, None, None).unwrap_err().to_string();
            assert!(error.contains("s3://***@bucket") && !error.contains("secret"), "{error}");
        }
        let error = Objects::open("s3://bucket", Some("http://key:secret@host"), None).unwrap_err().to_string();
        assert!(error.contains("--storage-endpoint http://***@host is none") && !error.contains("secret"), "{error}");
        for wrong in ["host:9000", "https://", "ftp://host", "http:///bucket"] {
            assert!(
                Objects::open("s3://bucket", Some(wrong), None).unwrap_err().to_string().contains("write https://")
            );
        }
    }

    #[test]
    fn somebody_has_to_sign_and_it_isnt_the_node() {
        let with = |names: &'static [&'static str]| {
            identified(&move |name: &str| names.contains(&name).then(|| "said".to_owned()))
        };
        assert!(with(&["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]));
        assert!(with(&["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"]));
        assert!(!with(&["AWS_ACCESS_KEY_ID"]) && !with(&["AWS_ROLE_ARN"]) && !with(&[]));
    }

    #[test]
    fn an_object_is_gone_only_where_the_server_says_so_of_the_object() {
        let error = |code: &str| object_store::Error::NotFound {
            path: "x".into(),
            source: format!("404 Not Found: <Error><Code>{code}</Code></Error>").into(),
        };
        assert!(absent(&error("NoSuchKey"), true));
        assert!(!absent(&error("NoSuchBucket"), true) && !absent(&error("XAdminUserNotFound"), true));
        let file = object_store::Error::NotFound { path: "x".into(), source: "No such file".into() };
        assert!(absent(&file, false));
    }

    #[test]
    fn what_a_server_says_is_told_with_the_setting_and_without_the_key() {
        let bucket = Bucket {
            address: "s3://fleet/a".into(),
            name: "fleet".into(),
            endpoint: Some("http://10.0.0.9:9000".into()),
            region: Some("eu-1".into()),
            hidden: Arc::new(vec!["AKIA123".into(), "topsecret".into()]),
        };
        let why = |body: &str| bucket.why(&object_store::Error::Generic { store: "S3", source: body.into() });
        let answer = |status: &str, code: &str| {
            why(&format!(
                "Server returned non-2xx status code: {status}: <Error><Code>{code}</Code><Message>No, AKIA123.</Message>\
                 <AWSAccessKeyId>AKIA123</AWSAccessKeyId><StringToSign>topsecret</StringToSign></Error>"
            ))
        };
        let told = [
            answer("404 Not Found", "NoSuchBucket"),
            answer("404 Not Found", "XAdminUserNotFound"),
            answer("403 Forbidden", "InvalidAccessKeyId"),
            answer("403 Forbidden", "SignatureDoesNotMatch"),
            answer("403 Forbidden", "AccessDenied"),
            answer("400 Bad Request", "AuthorizationHeaderMalformed"),
            answer("400 Bad Request", "KeyTooLongError"),
            why("Server returned non-2xx status code: 502 Bad Gateway: <html>topsecret</html>"),
            why("Received redirect without LOCATION, this normally indicates an incorrectly configured region"),
            why("connection refused"),
        ];
        let told = told.join("\n");
        assert!(!told.contains("AKIA123") && !told.contains("topsecret"), "{told}");
        insta::assert_snapshot!(told);
    }
}
