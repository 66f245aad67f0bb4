//! The pool's own certificate authority: made, rotated well before its end, and the broker's certificate. Pure, but for
//! the keys that are drawn.
//!
//! A new authority is published in the bundle for `PUBLISH` before it signs anything, and the old one stays in the bundle
//! until what it signed is replaced, so that at no time a client meets a certificate that it can't check.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use sha2::{Digest, Sha256};

use crate::hex::hex;
use crate::operator::names;

/// Life of an authority.
pub const AUTHORITY_DAYS: i64 = 730;
/// Life of a broker's certificate.
pub const CERTIFICATE_DAYS: i64 = 90;
/// How long an authority is in the bundle before it signs.
pub const PUBLISH: SignedDuration = SignedDuration::from_hours(1);
/// How long an authority stays in the bundle after its last signature was replaced.
pub const STAY: SignedDuration = SignedDuration::from_hours(24);

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a certificate can't be made: {0}")]
    Make(#[from] rcgen::Error),
    #[error("the Secret {secret} can't be used: {what}; delete it, and a new authority is made")]
    Kept { secret: String, what: String },
}

/// A certificate with its key, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
    pub made: Timestamp,
    pub ends: Timestamp,
}

/// The authorities of a pool, as its Secret keeps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorities {
    /// Signs.
    pub current: Pair,
    /// Will sign, once everybody has heard of it.
    pub next: Option<Pair>,
    /// Has signed; its key is gone. With the time since when it signs no more.
    pub previous: Option<(String, Timestamp)>,
}

/// What time asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Keep,
    /// There is none yet.
    First,
    /// The end of the current one is near: publish another.
    Publish,
    /// The published one signs from now on.
    Promote,
    /// The previous one needn't be known any more.
    Forget,
}

/// Decides what is to be done with the authorities.
#[must_use]
pub fn plan(kept: Option<&Authorities>, now: Timestamp) -> Step {
    let Some(kept) = kept else { return Step::First };
    if let Some((_, since)) = &kept.previous
        && now.duration_since(*since) > STAY
    {
        return Step::Forget;
    }
    if let Some(next) = &kept.next {
        return if now.duration_since(next.made) >= PUBLISH { Step::Promote } else { Step::Keep };
    }
    if near(&kept.current, now) { Step::Publish } else { Step::Keep }
}

/// Whether less than a third of a certificate's life is left.
fn near(pair: &Pair, now: Timestamp) -> bool {
    pair.ends.duration_since(now) < pair.ends.duration_since(pair.made) / 3
}

/// Does one step.
///
/// # Errors
/// When no key can be drawn.
pub fn advance(kept: Option<Authorities>, pool: &str, now: Timestamp) -> Result<Authorities, Error> {
    let step = plan(kept.as_ref(), now);
    let Some(kept) = kept else {
        return Ok(Authorities { current: authority(pool, now)?, next: None, previous: None });
    };
    Ok(match step {
        Step::Keep | Step::First => kept,
        Step::Publish => Authorities { next: Some(authority(pool, now)?), ..kept },
        Step::Promote => match kept.next {
            Some(next) => Authorities { previous: Some((kept.current.certificate, now)), current: next, next: None },
            None => kept,
        },
        Step::Forget => Authorities { previous: None, ..kept },
    })
}

/// Whether the broker's certificate is to be replaced: another authority signs now, or its end is near.
#[must_use]
pub fn stale(certificate: &Pair, signer: &str, authorities: &Authorities, now: Timestamp) -> bool {
    signer != fingerprint(&authorities.current.certificate) || near(certificate, now)
}

/// What a certificate is known by.
#[must_use]
pub fn fingerprint(pem: &str) -> String {
    hex(&Sha256::digest(pem.as_bytes())[..16])
}

/// Midnight of a day, as certificates are dated here.
fn midnight(at: Timestamp) -> (Timestamp, (i32, u8, u8)) {
    let date = at.to_zoned(TimeZone::UTC).date();
    let parts =
        (i32::from(date.year()), u8::try_from(date.month()).unwrap_or(1), u8::try_from(date.day()).unwrap_or(1));
    let day = date.to_zoned(TimeZone::UTC).map_or(at, |z| z.timestamp());
    (day, parts)
}

/// The life of a certificate that is made now: from a day before, so that clocks may differ.
fn dated(params: &mut CertificateParams, now: Timestamp, days: i64) -> (Timestamp, Timestamp) {
    let hours = |n: i64| SignedDuration::from_hours(24 * n);
    let (_, from) = midnight(now.saturating_sub(hours(1)).unwrap_or(now));
    let (ends, to) = midnight(now.saturating_add(hours(days)).unwrap_or(now));
    params.not_before = rcgen::date_time_ymd(from.0, from.1, from.2);
    params.not_after = rcgen::date_time_ymd(to.0, to.1, to.2);
    (crate::operator::conditions::whole(now), ends)
}

fn authority(pool: &str, now: Timestamp) -> Result<Pair, Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, format!("kernelfleet pool {pool} {}", now.as_second()));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let (made, ends) = dated(&mut params, now, AUTHORITY_DAYS);
    Ok(Pair { certificate: params.self_signed(&key)?.pem(), key: key.serialize_pem(), made, ends })
}

/// A certificate for the broker, signed by the current authority.
///
/// # Errors
/// When the authority's key can't be read, or no key can be drawn.
pub fn certificate(authorities: &Authorities, now: Timestamp) -> Result<Pair, Error> {
    let signer = KeyPair::from_pem(&authorities.current.key)?;
    let issuer = Issuer::from_ca_cert_pem(&authorities.current.certificate, signer)?;
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![names::BROKER_NAME.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, names::BROKER_NAME);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let (made, ends) = dated(&mut params, now, CERTIFICATE_DAYS);
    Ok(Pair { certificate: params.signed_by(&key, &issuer)?.pem(), key: key.serialize_pem(), made, ends })
}

impl Authorities {
    /// Every authority that a client must accept.
    #[must_use]
    pub fn bundle(&self) -> String {
        let mut text = self.current.certificate.clone();
        for more in self.next.iter().map(|n| &n.certificate).chain(self.previous.iter().map(|p| &p.0)) {
            text.push_str(more);
        }
        text
    }

    /// As the Secret keeps them.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, String> {
        let mut data = BTreeMap::new();
        write(&mut data, "current", &self.current);
        if let Some(next) = &self.next {
            write(&mut data, "next", next);
        }
        if let Some((certificate, since)) = &self.previous {
            data.insert("previous.crt".into(), certificate.clone());
            data.insert("previous.since".into(), since.to_string());
        }
        data
    }

    /// From the Secret's data.
    ///
    /// # Errors
    /// Names what is missing.
    pub fn read(secret: &str, data: &BTreeMap<String, String>) -> Result<Self, Error> {
        let current = read(secret, data, "current")?;
        let next = if data.contains_key("next.crt") { Some(read(secret, data, "next")?) } else { None };
        let previous = match data.get("previous.crt") {
            Some(certificate) => Some((certificate.clone(), time(secret, data, "previous.since")?)),
            None => None,
        };
        Ok(Self { current, next, previous })
    }
}

/// Writes a pair under a word.
pub fn write(data: &mut BTreeMap<String, String>, word: &str, pair: &Pair) {
    data.insert(format!("{word}.crt"), pair.certificate.clone());
    data.insert(format!("{word}.key"), pair.key.clone());
    data.insert(format!("{word}.made"), pair.made.to_string());
    data.insert(format!("{word}.ends"), pair.ends.to_string());
}

/// Reads a pair.
///
/// # Errors
/// Names what is missing.
pub fn read(secret: &str, data: &BTreeMap<String, String>, word: &str) -> Result<Pair, Error> {
    let text = |key: &str| {
        let key = format!("{word}.{key}");
        let missing = || Error::Kept { secret: secret.into(), what: format!("it has no {key}") };
        data.get(&key).cloned().ok_or_else(missing)
    };
    Ok(Pair {
        certificate: text("crt")?,
        key: text("key")?,
        made: time(secret, data, &format!("{word}.made"))?,
        ends: time(secret, data, &format!("{word}.ends"))?,
    })
}

fn time(secret: &str, data: &BTreeMap<String, String>, key: &str) -> Result<Timestamp, Error> {
    let bad = || Error::Kept { secret: secret.into(), what: format!("its {key} is no time") };
    data.get(key).and_then(|t| t.parse().ok()).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(n: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + n * 86_400).unwrap()
    }

    #[test]
    fn an_authority_is_published_before_it_signs_and_known_until_what_it_signed_is_gone() {
        let first = advance(None, "p", day(0)).unwrap();
        assert_eq!(plan(Some(&first), day(400)), Step::Keep);
        assert_eq!(plan(Some(&first), day(500)), Step::Publish);
        let old = first.current.certificate.clone();
        let published = advance(Some(first), "p", day(500)).unwrap();
        assert!(published.current.certificate == old && published.bundle().matches("BEGIN").count() == 2);
        let soon = day(500) + SignedDuration::from_mins(59);
        assert_eq!(plan(Some(&published), soon), Step::Keep);
        let leaf = certificate(&published, day(500)).unwrap();
        let signer = fingerprint(&published.current.certificate);
        assert!(!stale(&leaf, &signer, &published, soon));
        let promoted = advance(Some(published), "p", day(501)).unwrap();
        assert!(promoted.current.certificate != old && promoted.bundle().contains(&old));
        assert!(stale(&leaf, &signer, &promoted, day(501)), "the broker's certificate is replaced");
        assert_eq!(plan(Some(&promoted), day(501)), Step::Keep);
        let forgotten = advance(Some(promoted), "p", day(503)).unwrap();
        assert!(!forgotten.bundle().contains(&old));
        assert_eq!(plan(Some(&forgotten), day(504)), Step::Keep);
    }

    #[test]
    fn a_certificate_is_replaced_when_a_third_of_its_life_is_left() {
        let authorities = advance(None, "p", day(0)).unwrap();
        let signer = fingerprint(&authorities.current.certificate);
        let leaf = certificate(&authorities, day(0)).unwrap();
        assert!(!stale(&leaf, &signer, &authorities, day(55)));
        assert!(stale(&leaf, &signer, &authorities, day(61)));
    }

    #[test]
    fn what_a_secret_keeps_comes_back_as_it_was() {
        let authorities = advance(None, "p", day(0)).unwrap();
        let published = advance(Some(authorities), "p", day(500)).unwrap();
        assert_eq!(Authorities::read("s", &published.data()).unwrap(), published);
        let promoted = advance(Some(published), "p", day(501)).unwrap();
        assert_eq!(Authorities::read("s", &promoted.data()).unwrap(), promoted);
        let mut broken = promoted.data();
        broken.remove("current.key");
        let error = Authorities::read("pool-ca", &broken).unwrap_err().to_string();
        assert!(error.contains("pool-ca") && error.contains("current.key") && error.contains("delete it"), "{error}");
    }
}
