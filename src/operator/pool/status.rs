//! From what was seen of a GpuPool's parts to its status. Pure. The last step.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;

use super::dereference::{Credentials, Facts, ready_replicas};
use super::validate;
use crate::api::NameReference;
use crate::api::pool::{Device, GpuPool, GpuPoolStatus, Sharing, Unhealthy};
use crate::operator::conditions::{Said, cut, set};
use crate::operator::names;

/// The condition that says whether a pool's verdicts are what they are called.
pub const TRUSTED: &str = "MeasurementsTrusted";
/// Its reason where no verdict of the pool is enforced.
pub const HOST_MEMORY: &str = "HostMemoryExposed";

/// Judges whose card isn't well that a status names.
const MOST_UNHEALTHY: usize = 32;

/// The status that follows. `checked` is what validation said, `failed` what applying said: one word, and a sentence.
#[must_use]
pub fn status(
    pool: &GpuPool,
    namespace: &str,
    checked: &Result<(), validate::Error>,
    failed: Option<(&'static str, String)>,
    facts: &Facts,
    now: Timestamp,
) -> GpuPoolStatus {
    let generation = pool.metadata.generation;
    let name = pool.metadata.name.clone().unwrap_or_default();
    let mut status = pool.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let conditions = &mut status.conditions;
    let valid = match checked {
        Ok(()) => Said::yes("Valid", "the spec can be carried out"),
        Err(error) => Said::no("Invalid", error.to_string()),
    };
    set(conditions, "Validated", &valid, generation, now);
    let ready = ready(pool, namespace, checked, failed, facts);
    set(conditions, "Ready", &ready, generation, now);
    let said = facts.said.as_ref().and_then(|s| s.as_ref().ok());
    set(conditions, TRUSTED, &trusted(pool, facts), generation, now);
    set(conditions, "Healthy", &healthy(facts), generation, now);
    status.judges_ready = facts.judges.as_ref().map(ready_replicas);
    status.broker =
        facts.ip.as_ref().map(|_| NameReference { name: names::broker(&name), namespace: namespace.into() });
    if let Some(said) = said {
        status.judges_registered = Some(number(said.judges));
        status.hardware = (!said.hardware.is_empty()).then(|| cut(&said.hardware, 512));
        status.queued = Some(number(said.queued));
        status.leased = Some(number(said.leased));
        // Two digits: a status is written when somebody would see a difference.
        status.busy = Some((said.busy.clamp(0.0, 1.0) * 100.0).round() / 100.0);
        let sick = said.each.iter().filter(|j| !j.unhealthy.is_empty()).take(MOST_UNHEALTHY);
        status.unhealthy = sick
            .map(|j| Unhealthy { pod: cut(&j.pod, 253), card: cut(&j.card, 128), message: cut(&j.unhealthy, 256) })
            .collect();
    } else {
        // What was so when the broker was last heard isn't so for ever: MeasurementsTrusted and Healthy say why it isn't told.
        (status.judges_registered, status.queued, status.leased, status.busy) = (None, None, None, None);
        status.unhealthy.clear();
    }
    status
}

/// That nothing is known of judges and of what waits for them, where the broker says nothing.
fn silent(facts: &Facts) -> Option<Said> {
    let unknown = "its judges, what waits for them and how busy they are aren't known until it is heard";
    match &facts.said {
        Some(Ok(_)) => None,
        Some(Err(why)) => Some(Said::unknown("BrokerSilent", format!("{why}; {unknown}"))),
        None => Some(Said::unknown("BrokerSilent", format!("the broker isn't ready; {unknown}"))),
    }
}

/// Whether a status is to be written. How busy the cards are alone is no news until it has moved by a twentieth, or to its
/// end: it falls for five minutes after the last work, and each write would be seen and be a pass of its own.
#[must_use]
pub fn due(old: Option<&GpuPoolStatus>, new: &GpuPoolStatus) -> bool {
    let Some(old) = old else { return true };
    let still = match (old.busy, new.busy) {
        (Some(before), Some(now)) if now > 0.0 && (before - now).abs() < 0.05 => Some(before),
        _ => new.busy,
    };
    *old != GpuPoolStatus { busy: still, ..new.clone() }
}

fn number(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// Replicas of a StatefulSet that are ready and of its present form, at least: of those that are ready, all that aren't
/// of that form might be.
fn present(set: &StatefulSet) -> i32 {
    let Some(status) = &set.status else { return 0 };
    if status.observed_generation < set.metadata.generation {
        return 0;
    }
    let before = status.replicas - status.updated_replicas.unwrap_or(0);
    (status.ready_replicas.unwrap_or(0) - before).max(0)
}

/// What is wrong with the bucket's credentials, before anybody has used them.
fn credentials(secret: &str, namespace: &str, found: &Credentials) -> Option<Said> {
    let keys = "access-key-id and secret-access-key";
    match found {
        Credentials::Unnamed | Credentials::There(_) => None,
        Credentials::Unreadable(why) => Some(Said::no(
            "CredentialsUnreadable",
            format!("spec.objectStore.credentialsSecret: {why}; the broker is left as it is until it can be"),
        )),
        Credentials::Missing => Some(Said::no(
            "CredentialsNotFound",
            format!(
                "spec.objectStore.credentialsSecret: there is no Secret {secret} in the namespace {namespace}; make it, with the \
                 keys {keys}: kubectl create secret generic {secret} -n {namespace} --from-file=access-key-id \
                 --from-file=secret-access-key"
            ),
        )),
        Credentials::Without(key) => Some(Said::no(
            "CredentialsIncomplete",
            format!(
                "spec.objectStore.credentialsSecret: the Secret {secret} in the namespace {namespace} has nothing under the key \
                 {key}; it needs {keys}"
            ),
        )),
    }
}

/// Where a person looks: what a container printed before it ended is in both.
fn hint(pod: &str, namespace: &str) -> String {
    format!("kubectl describe pod {pod} -n {namespace} and kubectl logs {pod} -n {namespace} say why")
}

fn ready(
    pool: &GpuPool,
    namespace: &str,
    checked: &Result<(), validate::Error>,
    failed: Option<(&'static str, String)>,
    facts: &Facts,
) -> Said {
    if checked.is_err() {
        return Said::no("Invalid", "the spec can't be carried out; the condition Validated says why");
    }
    if let Some((reason, failed)) = failed {
        return Said::no(reason, failed);
    }
    let secret = pool.spec.credentials().unwrap_or_default();
    if let Some(said) = credentials(secret, namespace, &facts.credentials) {
        return said;
    }
    let Some(broker) = &facts.broker else { return Said::no("Starting", "the broker is being made") };
    let name = pool.metadata.name.clone().unwrap_or_default();
    if ready_replicas(broker) == 0 {
        let hint = hint(&names::broker_pod(&name), namespace);
        return Said::no("BrokerNotReady", format!("the broker's pod is not ready; {hint}"));
    }
    if present(broker) == 0 {
        return Said::no("BrokerUpdating", "the broker's pod is being replaced by one of the present form");
    }
    match &facts.said {
        Some(Err(why)) => return Said::no("BrokerUnreachable", why.clone()),
        None => return Said::no("Starting", "the broker was not asked yet"),
        Some(Ok(_)) => {}
    }
    if let Some(Ok(said)) = &facts.said
        && !said.objects_failing.is_empty()
    {
        let from = if secret.is_empty() { String::new() } else { format!(" and the Secret {secret}") };
        let why = cut(&said.objects_failing, 2048);
        let message = format!(
            "the broker can't use its bucket: {why}. What it was told is from spec.objectStore{from}; results and \
             trajectories wait until it can"
        );
        return Said::no("ObjectStoreFailing", message);
    }
    if let (Some(wanted), Some(Ok(said))) = (&pool.spec.arch, &facts.said)
        && let Some(found) = arch(&said.properties_json)
        && wanted.trim_end_matches(['a', 'f']) != found
    {
        let message = format!(
            "spec.arch is {wanted}, and a judge found a card of {found}; choose the nodes in spec.podTemplate, or correct spec.arch"
        );
        return Said::no("WrongArch", message);
    }
    let wanted = pool.spec.replicas;
    let ready = facts.judges.as_ref().map_or(0, present);
    let before = facts.judges.as_ref().map_or(0, ready_replicas) - ready;
    if wanted == 0 {
        return Said::no("NoJudges", "spec.replicas is 0: evaluations wait until there is a judge");
    }
    if ready == 0 && before > 0 {
        let message = format!("{before} judges of the form before go on while they are replaced one after the other");
        return Said::no("JudgesUpdating", message);
    }
    if ready == 0 {
        let hint = hint(&format!("{}-0", names::judge(&name)), namespace);
        return Said::no("JudgesNotReady", format!("none of {wanted} judges is ready; {hint}"));
    }
    let missing = lacking(facts);
    if ready < wanted {
        return Said::yes("SomeJudgesReady", format!("{ready} of {wanted} judges are ready{missing}"));
    }
    Said::yes("JudgesReady", format!("all {wanted} judges are ready{missing}"))
}

/// Allowed namespaces that the pool can't serve, as a part of a sentence.
fn lacking(facts: &Facts) -> String {
    let told = |names: &[String], what: &str| match names {
        [] => String::new(),
        names => format!("; these allowed namespaces {what}: {}", names.join(", ")),
    };
    told(&facts.missing_namespaces, "don't exist") + &told(&facts.ending_namespaces, "are being deleted")
}

/// Compute capability of a card, by what judges tell of it.
fn arch(properties: &str) -> Option<String> {
    let properties: serde_json::Value = serde_json::from_str(properties).ok()?;
    Some(format!("sm_{}{}", properties["major"].as_u64()?, properties["minor"].as_u64()?))
}

/// Whether a card's code reaches its host's memory, by what judges tell of it.
fn exposed(properties: &str) -> bool {
    let properties: serde_json::Value = serde_json::from_str(properties).unwrap_or_default();
    properties["pageable_memory_access"] == true
}

/// Whether nobody else is on the cards while something is measured.
fn trusted(pool: &GpuPool, facts: &Facts) -> Said {
    match pool.spec.sharing {
        Sharing::Exclusive => {}
        Sharing::Mig => {
            return Said::no(
                "SharedCard",
                "spec.sharing is Mig: instances of one card share its power and its memory bus; use Exclusive for figures \
                 that are compared",
            );
        }
        Sharing::TimeSlicing => {
            return Said::no(
                "SharedCard",
                "spec.sharing is TimeSlicing: pods of others may be on the card while something is measured; use Exclusive \
                 for figures that are compared",
            );
        }
    }
    if let Some(said) = silent(facts) {
        return said;
    }
    let Some(Ok(said)) = &facts.said else { return Said::unknown("NotKnown", "no judge has been heard of yet") };
    let shared: Vec<&str> = said.each.iter().filter(|j| j.sharing > 1).map(|j| j.card.as_str()).collect();
    if let Some(card) = shared.first() {
        let more = said.each.iter().filter(|j| j.card == *card).map(|j| j.pod.as_str()).collect::<Vec<_>>().join(", ");
        return Said::no(
            "SharedCard",
            format!("several judges are on the card {card}: {more}; give each judge a card of its own"),
        );
    }
    if said.each.is_empty() {
        return Said::unknown("NotKnown", "no judge has been heard of yet");
    }
    if pool.spec.device == Device::Cpu {
        let message = "processors are shared with whatever runs on the node: each verdict says whether others used them while it \
                       was measured, and a job's status.untrusted counts those";
        return Said::unknown("EachByItself", message);
    }
    if exposed(&said.properties_json) {
        return Said::no(HOST_MEMORY, crate::judge::EXPOSED);
    }
    Said::yes("ExclusiveCards", "each judge has a card of its own")
}

fn healthy(facts: &Facts) -> Said {
    if let Some(said) = silent(facts) {
        return said;
    }
    let Some(Ok(said)) = &facts.said else { return Said::unknown("NotKnown", "no judge has been heard of yet") };
    match said.each.iter().filter(|j| !j.unhealthy.is_empty()).collect::<Vec<_>>().as_slice() {
        [] if said.each.is_empty() => Said::unknown("NotKnown", "no judge has been heard of yet"),
        [] => Said::yes("CardsWell", "no card says that it isn't well"),
        [first, ..] => Said::no(
            "CardUnwell",
            format!("{}: {}; it gets no work until that is over. Drain or reset the card", first.pod, first.unhealthy),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::wire::v1::{JudgeFacts, PoolFacts};

    fn pool(spec: Value) -> GpuPool {
        let object = json!({"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool", "metadata": {"name": "p", "generation": 2}, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    fn set(ready: i32) -> Option<StatefulSet> {
        serde_json::from_value(json!({"metadata": {}, "spec": {"selector": {}, "serviceName": "x", "template": {}}, "status": {"replicas": 2, "updatedReplicas": 2, "readyReplicas": ready}})).unwrap()
    }

    /// One whose pods are replaced: so many of two are of the present form.
    fn rolling(ready: i32, updated: i32) -> Option<StatefulSet> {
        let mut set = set(ready);
        if let Some(status) = set.as_mut().and_then(|s| s.status.as_mut()) {
            status.updated_replicas = Some(updated);
        }
        set
    }

    #[test]
    fn what_is_ready_is_what_is_ready_of_the_present_form() {
        let of = |set: Option<StatefulSet>| present(&set.unwrap());
        assert_eq!([of(set(2)), of(rolling(2, 1)), of(rolling(2, 0)), of(rolling(1, 1))], [2, 1, 0, 0]);
        let mut unseen = set(2).unwrap();
        unseen.metadata.generation = Some(7);
        assert_eq!(present(&unseen), 0, "its controller hasn't looked yet");
    }

    fn line(status: &GpuPoolStatus) -> String {
        status.conditions.iter().map(|c| format!("{}={} {}: {}\n", c.type_, c.status, c.reason, c.message)).collect()
    }

    #[test]
    fn how_busy_a_pool_is_alone_is_written_seldom() {
        let status = |busy: f64, queued: i32| GpuPoolStatus {
            busy: Some(busy),
            queued: Some(queued),
            ..GpuPoolStatus::default()
        };
        let old = status(0.5, 0);
        assert!(!due(Some(&old), &status(0.47, 0)));
        assert!(due(Some(&old), &status(0.44, 0)) && due(Some(&old), &status(0.49, 1)));
        assert!(due(Some(&status(0.01, 0)), &status(0.0, 0)) && !due(Some(&old), &old) && due(None, &old));
    }

    #[test]
    fn figures_of_a_broker_that_is_silent_are_not_those_of_before() {
        let said = PoolFacts {
            judges: 2,
            queued: 7,
            leased: 2,
            busy: 0.9,
            hardware: "8 cores".into(),
            ..PoolFacts::default()
        };
        let facts = |said| Facts { broker: set(1), judges: set(2), said, ..Facts::default() };
        let mut pool = pool(json!({"device": "cpu", "replicas": 2}));
        let told =
            |pool: &GpuPool, said| status(pool, "kernelfleet", &Ok(()), None, &facts(said), Timestamp::UNIX_EPOCH);
        let heard = told(&pool, Some(Ok(said)));
        assert_eq!((heard.queued, heard.leased, heard.busy), (Some(7), Some(2), Some(0.9)));
        pool.status = Some(heard.clone());
        for silent in [Some(Err("the broker of pool p can't be reached: refused".to_owned())), None] {
            let now = told(&pool, silent);
            assert_eq!((now.queued, now.leased, now.busy, now.judges_registered), (None, None, None, None));
            assert_eq!(now.hardware.as_deref(), Some("8 cores"), "cards stay what they are");
            assert!(line(&now).contains("Healthy=Unknown BrokerSilent"), "{}", line(&now));
            assert!(due(Some(&heard), &now));
        }
    }

    #[test]
    fn a_secret_of_certificates_that_cannot_be_read_is_told() {
        let why = Some(("SecretUnreadable", "the Secret p-broker-ca can't be read: forbidden".to_owned()));
        let pool = pool(json!({"device": "cpu"}));
        let told = line(&status(&pool, "kernelfleet", &Ok(()), why, &Facts::default(), Timestamp::UNIX_EPOCH));
        assert!(told.contains("Ready=False SecretUnreadable: the Secret p-broker-ca can't be read"), "{told}");
    }

    #[test]
    fn a_card_of_another_kind_is_told() {
        let said = |major: u32| PoolFacts {
            properties_json: json!({ "major": major, "minor": 0 }).to_string(),
            ..PoolFacts::default()
        };
        let facts = |major| Facts { broker: set(1), judges: set(1), said: Some(Ok(said(major))), ..Facts::default() };
        let now = Timestamp::UNIX_EPOCH;
        let hopper = pool(json!({"device": "cuda", "arch": "sm_90a"}));
        let told = |major| line(&status(&hopper, "kernelfleet", &Ok(()), None, &facts(major), now));
        assert!(
            told(8).contains("Ready=False WrongArch: spec.arch is sm_90a, and a judge found a card of sm_80"),
            "{}",
            told(8)
        );
        assert!(told(9).contains("Ready=True JudgesReady"), "{}", told(9));
    }

    #[test]
    fn a_card_whose_code_reaches_the_hosts_memory_is_told() {
        let said = |exposed: bool| PoolFacts {
            properties_json: json!({"major": 9, "minor": 0, "pageable_memory_access": exposed}).to_string(),
            each: vec![crate::wire::v1::JudgeFacts { pod: "p-judge-0".into(), sharing: 1, ..Default::default() }],
            ..PoolFacts::default()
        };
        let card = pool(json!({"device": "cuda"}));
        let told = |exposed| {
            let facts = Facts { broker: set(1), judges: set(1), said: Some(Ok(said(exposed))), ..Facts::default() };
            line(&status(&card, "kernelfleet", &Ok(()), None, &facts, Timestamp::UNIX_EPOCH))
        };
        assert!(told(false).contains("MeasurementsTrusted=True ExclusiveCards"), "{}", told(false));
        assert!(
            told(true).contains("MeasurementsTrusted=False HostMemoryExposed: device code can reach"),
            "{}",
            told(true)
        );
    }

    #[test]
    fn a_bucket_that_cannot_be_used_is_told_with_what_to_do() {
        let stored = pool(json!({"device": "cpu", "objectStore": {
            "url": "s3://fleet/a", "endpoint": "http://10.0.0.9:9000", "credentialsSecret": {"name": "bucket"}}}));
        let failing = PoolFacts {
            objects_failing: "--storage s3://fleet/a/p: there is no bucket fleet (NoSuchBucket)".into(),
            ..PoolFacts::default()
        };
        let there = Credentials::There("1".into());
        let stories = [
            ("no Secret", Facts { credentials: Credentials::Missing, broker: set(1), ..Facts::default() }),
            (
                "a Secret that is refused",
                Facts {
                    credentials: Credentials::Unreadable("the Secret bucket can't be read: forbidden".into()),
                    broker: set(1),
                    ..Facts::default()
                },
            ),
            ("half a Secret", Facts { credentials: Credentials::Without("secret-access-key"), ..Facts::default() }),
            (
                "no bucket",
                Facts {
                    credentials: there,
                    broker: set(1),
                    judges: set(1),
                    said: Some(Ok(failing)),
                    ..Facts::default()
                },
            ),
        ];
        let mut text = String::new();
        for (story, facts) in stories {
            let told = line(&status(&stored, "kernelfleet", &Ok(()), None, &facts, Timestamp::UNIX_EPOCH));
            let ready = told.lines().find(|l| l.starts_with("Ready=")).unwrap().to_owned();
            text.push_str(&format!("# {story}\n{ready}\n"));
        }
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_pools_conditions_tell_what_is_missing_and_what_to_do() {
        let cpu = pool(json!({"device": "cpu", "replicas": 2}));
        let judge = |pod: &str, card: &str, sharing, unhealthy: &str| JudgeFacts {
            pod: pod.into(),
            card: card.into(),
            unhealthy: unhealthy.into(),
            sharing,
        };
        let said = |each: Vec<JudgeFacts>| {
            Some(Ok(PoolFacts {
                judges: u32::try_from(each.len()).unwrap(),
                busy: 0.123_456,
                each,
                ..PoolFacts::default()
            }))
        };
        let well = vec![judge("p-judge-0", "n1", 1, ""), judge("p-judge-1", "n2", 1, "")];
        let sick =
            vec![judge("p-judge-0", "GPU-1", 2, "Xid 79: fallen off the bus"), judge("p-judge-1", "GPU-1", 2, "")];
        let facts =
            |broker, judges, said| Facts { broker, judges, said, ip: Some("10.0.0.1".into()), ..Facts::default() };
        let stories = [
            ("nothing is there", Facts::default()),
            ("the broker starts", facts(set(0), set(0), None)),
            (
                "the broker does not answer",
                facts(set(1), set(0), Some(Err("the broker of pool p can't be reached: refused".into()))),
            ),
            ("the broker is replaced", facts(rolling(1, 0), set(2), said(well.clone()))),
            ("judges are replaced", facts(set(2), rolling(2, 0), said(well.clone()))),
            ("no judge", facts(set(1), set(0), said(Vec::new()))),
            ("one judge", facts(set(1), set(1), said(well.clone()))),
            ("all judges", facts(set(1), set(2), said(well.clone()))),
            (
                "namespaces are lacking",
                Facts {
                    missing_namespaces: vec!["gone".into()],
                    ending_namespaces: vec!["ending".into()],
                    ..facts(set(1), set(2), said(well.clone()))
                },
            ),
            ("a card is shared and sick", facts(set(1), set(2), said(sick))),
        ];
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let mut text = String::new();
        for (story, facts) in stories {
            text.push_str(&format!("# {story}\n{}", line(&status(&cpu, "kernelfleet", &Ok(()), None, &facts, now))));
        }
        let invalid = Err(validate::Error::Namespace("A b".into()));
        text.push_str(&format!(
            "# invalid\n{}",
            line(&status(&cpu, "kernelfleet", &invalid, None, &Facts::default(), now))
        ));
        let sliced = pool(json!({"device": "cuda", "sharing": "TimeSlicing"}));
        text.push_str(&format!(
            "# time slicing\n{}",
            line(&status(
                &sliced,
                "kernelfleet",
                &Ok(()),
                Some(("ApplyFailed", "Service p-broker is there already".to_owned())),
                &Facts::default(),
                now
            ))
        ));
        insta::assert_snapshot!(text);
    }
}
