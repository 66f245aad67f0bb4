//! Episodes of a model as a run sees them: `endpoint` and `replay`.
//!
//! Knows how an episode's parts are put together on one machine. Must not know the loop, nor how anything is judged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::run::{Halt, Judged, Policy, Trouble, Work};
use crate::agent::author::{Author, Endpoint, Recording};
use crate::agent::desk::{Assessor, Compiled, Standing, Unjudged};
use crate::agent::episode::{self, Ended, Limits, Setting, Socket, reaches_goal};
use crate::agent::kit::Brief;
use crate::agent::trajectory::Line;
use crate::api::job::{Baseline, Target};
use crate::judge::counters::Kernel;
use crate::judge::verdict::{LaunchEvidence, Reason};
use crate::judge::{Candidate, Device, Effort, Verdict};
use crate::sandbox::workspace::{Error as SandboxError, Workspace};

/// Makes a workspace whose tools reach the desk at a socket.
pub type Workspaces = Box<dyn Fn(&Path) -> Result<Box<dyn Workspace>, SandboxError> + Send + Sync>;

/// Who writes the candidates.
#[derive(Clone, Debug)]
pub enum Who {
    Endpoint(Endpoint),
    /// A trajectory a task, by the task's name.
    Replay(BTreeMap<String, Vec<Line>>),
}

/// The policy of a job with a model.
pub struct Episodes {
    pub who: Who,
    pub limits: Limits,
    /// Episodes a task.
    pub attempts: usize,
    pub device: Device,
    /// What kernels run on, in words.
    pub hardware: String,
    pub libraries: Vec<String>,
    pub workspaces: Workspaces,
    /// Where the desk listens; in a folder of its own if nothing is said.
    pub desk: Option<PathBuf>,
}

impl std::fmt::Debug for Episodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Episodes").field("limits", &self.limits).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Policy for Episodes {
    fn work(&self, work: &mut Work<'_>) -> Result<(), Halt> {
        for attempt in 1..=self.attempts.max(1) {
            if work.stopped() || work.reached() {
                break;
            }
            let ended = self.episode(work, attempt)?;
            let unjudged = ended.not_the_model && work.best().is_none();
            let reason = ended.tail.reason.clone();
            work.episode = Some(ended.tail);
            // An endpoint that is away says nothing of the task: the next start tries again.
            if unjudged {
                return Err(Trouble::Fault(reason).into());
            }
        }
        Ok(())
    }
}

impl Episodes {
    fn episode(&self, work: &mut Work<'_>, attempt: usize) -> Result<Ended, Halt> {
        let fault = |e: &dyn std::fmt::Display| Halt::Trouble(Trouble::Fault(e.to_string()));
        let mut author: Box<dyn Author> = match &self.who {
            Who::Endpoint(endpoint) => Box::new(endpoint.clone()),
            Who::Replay(all) => match all.get(&work.task.name) {
                Some(lines) => Box::new(Recording::new(lines)),
                None => return Err(Halt::Declined("there is no recorded trajectory of this task".into())),
            },
        };
        let name = if attempt == 1 { "trajectory.jsonl".to_owned() } else { format!("trajectory-{attempt}.jsonl") };
        let (task, progress, stop) = (work.task, work.progress, work.stop);
        let say = |what: &str| progress.say(&task.name, what);
        let setting = Setting {
            task,
            brief: Brief {
                device: self.device,
                hardware: self.hardware.clone(),
                libraries: self.libraries.clone(),
                turns: self.limits.turns,
                target: work.target().map(clause),
            },
            limits: self.limits,
            trajectory: work.folder.join(name),
            stop,
            say: &say,
        };
        say("beginning an episode");
        let socket = self
            .desk
            .as_deref()
            .map_or_else(Socket::new, Socket::at)
            .map_err(|e| fault(&format!("no socket for the workspace's tools: {e}")))?;
        let mut workspace = (self.workspaces)(socket.path()).map_err(|e| fault(&e))?;
        let mut assessor = Attempts { work, trouble: None };
        let played = episode::play(&setting, author.as_mut(), workspace.as_mut(), &socket, &mut assessor);
        let trouble = assessor.trouble.take();
        played.map_err(|error| match (error, trouble) {
            (episode::Error::Judge(_), Some(trouble)) => Halt::Trouble(trouble),
            (error, _) => fault(&error),
        })
    }
}

/// The job's target as a clause of the prompt.
fn clause(target: &Target) -> String {
    let baseline = match target.baseline {
        Baseline::Eager => "eager PyTorch",
        Baseline::Compile => "torch.compile",
    };
    format!("a profiled candidate is certainly {} times as fast as {baseline}", target.speedup)
}

/// What an episode asks, as attempts at the run's task.
struct Attempts<'a, 'b> {
    work: &'a mut Work<'b>,
    trouble: Option<Trouble>,
}

impl Attempts<'_, '_> {
    fn told<T>(&mut self, done: Result<T, Trouble>) -> Result<T, Unjudged> {
        done.map_err(|trouble| {
            let text = trouble.to_string();
            self.trouble = Some(trouble);
            Unjudged(text)
        })
    }

    fn attempt(&mut self, candidate: &Candidate, effort: Effort, idea: &str) -> Result<Verdict, Unjudged> {
        let mut verdict = None;
        let part = [(candidate.clone(), idea.to_owned())];
        let done = self.work.attempt(&part, effort, &mut |_, v| verdict = Some(v.clone()));
        self.told(done)?;
        verdict.ok_or_else(|| Unjudged("the judge gave no verdict".into()))
    }
}

fn same(a: &Candidate, b: &Judged) -> bool {
    a.files == b.candidate.files
}

impl Assessor for Attempts<'_, '_> {
    fn compile(&mut self, candidate: &Candidate) -> Result<Compiled, Unjudged> {
        let done = self.work.compile(candidate);
        Ok(match self.told(done)? {
            Ok(launches) => Compiled::Built(launches),
            Err(reason) => Compiled::Refused(reason),
        })
    }

    fn verify(&mut self, candidate: &Candidate) -> Result<Verdict, Unjudged> {
        let done = self.work.verify(candidate);
        self.told(done)
    }

    fn profile(&mut self, candidate: &Candidate) -> Result<Verdict, Unjudged> {
        self.attempt(candidate, Effort::Final, "profiled by the model")
    }

    fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Unjudged> {
        let done = self.work.reference();
        self.told(done)
    }

    fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Unjudged> {
        let done = self.work.counters(candidate);
        self.told(done)
    }

    fn finish(&mut self, last: Option<&Candidate>) -> Result<Option<Verdict>, Unjudged> {
        // What the model left and never had profiled counts too; the untouched template is no candidate.
        if let Some(last) = last.filter(|c| c.files.len() > 1)
            && !self.work.best().is_some_and(|best| same(last, best))
        {
            self.attempt(last, Effort::Final, "as the model left it")?;
        }
        let done = self.work.finish().map(|judged| judged.map(|j| j.verdict.clone()));
        self.told(done)
    }

    fn standing(&self) -> Standing {
        let Some(best) = self.work.best() else { return Standing::default() };
        let speedups = [("eager", best.verdict.speedup.eager), ("torch.compile", best.verdict.speedup.compile)];
        let speedups = speedups.iter().filter_map(|(name, s)| s.map(|s| format!("{:.2}x over {name}", s.median)));
        Standing {
            reward: Some(best.verdict.reward),
            speedups: speedups.collect::<Vec<_>>().join(", "),
            goal: reaches_goal(&best.verdict),
            reached: self.work.reached(),
        }
    }
}

/// How an episode's limits follow from a job.
#[must_use]
pub fn limits(agent: &crate::api::job::Agent) -> Limits {
    Limits {
        turns: u32::try_from(agent.max_turns).unwrap_or(1),
        context_tokens: u64::try_from(agent.context_tokens).unwrap_or(1024),
        deadline: agent.active_deadline_seconds.and_then(|s| u64::try_from(s).ok()).map(Duration::from_secs),
        ..Limits::default()
    }
}
