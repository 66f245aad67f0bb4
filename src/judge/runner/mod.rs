//! Runners: the processes that execute a plan, and the supervisor's handle on them.
//!
//! This file holds what both sides of the socket share: the messages of `docs/interfaces.md` (section
//! Runners), the error that crosses it, and the loop that answers requests. It knows neither how a device
//! runs a plan nor when a supervisor asks for it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::judge::wire::{Channel, Error as WireError, MAX_FDS};
use crate::plan::{BufferKind, Device, Limits, Plan, validate};
use crate::sandbox::refused;

pub mod client;
pub mod cpu;
pub mod cuda;

/// Program names of the hidden subcommands.
pub const CPU_COMMAND: &str = "runner-cpu";
/// As [`CPU_COMMAND`], for the CUDA device.
pub const CUDA_COMMAND: &str = "runner-cuda";
/// The descriptor on which a runner finds its socket.
pub const CHANNEL_FD: i32 = 3;

/// A buffer that crosses the socket: index of its descriptor in the frame, bytes that may be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    pub fd: usize,
    pub bytes: u64,
}

/// A buffer of the plan that crosses the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBuffer {
    /// Index into `plan.buffers`.
    pub buffer: usize,
    pub fd: usize,
    pub bytes: u64,
}

/// Where one derived constant lies in the memory file of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    pub offset: u64,
    pub bytes: u64,
}

/// The memory file of the derived constants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constants {
    pub fd: usize,
    pub items: Vec<Item>,
}

/// Arithmetic of library calls on float32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arithmetic {
    /// Matrix products may round their operands to TF32.
    pub matmul_tf32: bool,
    /// Convolutions may.
    pub conv_tf32: bool,
}

/// Body of `buffers`: what does not fit into the frame of `load` (a frame carries at most 250 descriptors).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Buffers {
    #[serde(default)]
    pub parameters: BTreeMap<String, Shared>,
    /// CPU: workspaces and constants, which the supervisor owns.
    #[serde(default)]
    pub buffers: Vec<SharedBuffer>,
}

/// Body of `load`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    pub plan: Plan,
    /// Descriptor of each module's image, in the order of `plan.modules`.
    pub images: Vec<usize>,
    pub slots: usize,
    /// `[slot][input]`; `null` for inputs that are Python values.
    pub inputs: Vec<Vec<Option<Shared>>>,
    #[serde(flatten)]
    pub buffers: Buffers,
    #[serde(default)]
    pub constants: Option<Constants>,
    /// `cublaslt`, `cudnn` -> path; any other name is loaded before those two (CUDA only).
    #[serde(default)]
    pub libraries: BTreeMap<String, String>,
    #[serde(default)]
    pub precision: Arithmetic,
    #[serde(default)]
    pub seed: u64,
    /// CPU: the socket of the library helper.
    #[serde(default)]
    pub helper: Option<usize>,
}

/// What the device says about a launch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaunchInfo {
    pub node: usize,
    pub kernel: String,
    /// Registers a thread.
    pub registers: u32,
    /// Static and dynamic shared memory a block.
    pub shared_bytes: u64,
    /// Local memory a thread.
    pub local_bytes: u64,
    /// Resident threads over the most that a multiprocessor can hold, 0 to 1.
    pub occupancy: f64,
}

/// Time of one node alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeTime {
    pub node: usize,
    pub time_us: f64,
}

/// Reply of `run`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Between device events around the plan; 0 on the CPU, where the supervisor's clock counts.
    pub time_us: f64,
    /// The runner's host clock from the L2 flush to the end of the plan; compare with `null`'s. 0 on the CPU.
    #[serde(default)]
    pub wall_us: f64,
}

/// Reply of `null`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NullSamples {
    pub time_us: Vec<f64>,
    #[serde(default)]
    pub wall_us: Vec<f64>,
}

/// An operation that failed: what a runner answers instead of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Fault {
    /// `illegal_access`, `launch_failed`, `library_failed`, `memory`, `symbol`, `image`, `arguments`, `plan`, ...
    pub code: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
}

impl Fault {
    /// A fault that belongs to no node.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), node: None, kernel: None }
    }

    /// The same fault, laid at a node's door.
    #[must_use]
    pub fn at(mut self, node: usize) -> Self {
        self.node = Some(node);
        self
    }

    /// The same fault, with the name of the kernel.
    #[must_use]
    pub fn of(mut self, kernel: &str) -> Self {
        self.kernel = Some(kernel.to_owned());
        self
    }
}

/// A successful answer: fields beside `"ok": true`, and descriptors.
#[derive(Debug, Default)]
pub struct Reply {
    pub body: Map<String, Value>,
    pub fds: Vec<OwnedFd>,
}

impl Reply {
    /// The answer that `value`'s fields make.
    ///
    /// # Errors
    /// When `value` isn't an object of JSON.
    pub fn of<T: Serialize>(value: &T) -> Result<Self, Fault> {
        match serde_json::to_value(value) {
            Ok(Value::Object(body)) => Ok(Self { body, fds: Vec::new() }),
            Ok(_) => Err(Fault::new("internal", "a reply must be an object")),
            Err(e) => Err(Fault::new("internal", format!("a reply can't be written as JSON: {e}"))),
        }
    }
}

/// What a device does with one request.
pub trait Serve {
    /// Answers `op`; `body` is the whole request, `fds` its descriptors.
    ///
    /// # Errors
    /// The fault that goes to the supervisor.
    fn answer(&mut self, op: &str, body: Value, fds: Fds) -> Result<Reply, Fault>;
}

/// Descriptors of a frame, each to be taken once.
#[derive(Debug)]
pub struct Fds(Vec<Option<OwnedFd>>);

impl Fds {
    #[must_use]
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    /// Takes descriptor `index`.
    ///
    /// # Errors
    /// When the frame has no such descriptor, or it was taken before.
    pub fn take(&mut self, index: usize) -> Result<OwnedFd, Fault> {
        self.0
            .get_mut(index)
            .and_then(Option::take)
            .ok_or_else(|| Fault::new("request", format!("descriptor {index} is missing or named twice")))
    }
}

/// Reads the body of a request.
///
/// # Errors
/// `request` with what is wrong with it.
pub fn parse<T: serde::de::DeserializeOwned>(body: Value) -> Result<T, Fault> {
    serde_json::from_value(body).map_err(|e| Fault::new("request", format!("the request can't be read: {e}")))
}

/// Answers requests until the other end closes, then ends the process without running exit handlers
/// (a candidate's library may have left some).
pub fn serve(mut channel: Channel, device: &mut dyn Serve) -> ! {
    let status = loop {
        let frame = match channel.receive(None) {
            Ok(frame) => frame,
            Err(WireError::Closed) => break 0,
            Err(_) => break 2,
        };
        let id = frame.body.get("id").cloned().unwrap_or(Value::Null);
        let op = frame.body.get("op").and_then(Value::as_str).unwrap_or_default().to_owned();
        if op == "close" {
            let _ = channel.send(&json!({"ok": true, "id": id}), &[]);
            break 0;
        }
        let sent = match device.answer(&op, frame.body, Fds::new(frame.fds)) {
            Ok(reply) => {
                let mut body = Map::with_capacity(reply.body.len() + 2);
                body.insert("ok".to_owned(), Value::Bool(true));
                body.insert("id".to_owned(), id);
                body.extend(reply.body);
                tell_refused(&mut body);
                let fds: Vec<_> = reply.fds.iter().map(AsFd::as_fd).collect();
                channel.send(&Value::Object(body), &fds)
            }
            Err(fault) => channel.send(&refusal(&fault, id), &[]),
        };
        if sent.is_err() {
            break 3;
        }
    };
    // SAFETY: `_exit` takes any status and doesn't return.
    unsafe { libc::_exit(status) }
}

/// Field of a reply, beside what its operation answers: system calls that the runner's filter has refused so far.
pub const REFUSED_CALLS: &str = "refused_calls";

fn tell_refused(body: &mut Map<String, Value>) {
    let calls = refused::calls();
    if !calls.is_empty() {
        body.insert(REFUSED_CALLS.to_owned(), json!(calls));
    }
}

fn refusal(fault: &Fault, id: Value) -> Value {
    let mut body = json!({"ok": false, "id": id, "code": fault.code, "message": fault.message});
    if let Value::Object(map) = &mut body {
        tell_refused(map);
    }
    if let Some(node) = fault.node {
        body["node"] = json!(node);
    }
    if let Some(kernel) = &fault.kernel {
        body["kernel"] = json!(kernel);
    }
    body
}

/// Takes over descriptor 3.
///
/// # Errors
/// When it isn't an open socket: the subcommand was started by hand.
pub fn inherited_channel() -> std::io::Result<Channel> {
    use std::os::fd::FromRawFd;
    let mut kind: libc::c_int = 0;
    let mut size = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(4);
    // SAFETY: `kind` and `size` are valid for writes and `size` is the size of `kind`.
    let got =
        unsafe { libc::getsockopt(CHANNEL_FD, libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &raw mut size) };
    if got != 0 || kind != libc::SOCK_STREAM {
        return Err(std::io::Error::other("descriptor 3 isn't a stream socket; this command is started by a judge"));
    }
    // SAFETY: sets a flag of a descriptor that is open.
    unsafe { libc::fcntl(CHANNEL_FD, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: descriptor 3 is open (asked above) and by contract belongs to this process's channel alone.
    Ok(Channel::new(unsafe { std::os::unix::net::UnixStream::from_raw_fd(CHANNEL_FD) }))
}

/// Workspaces that hold an output, in rising order, without repetition.
#[must_use]
pub fn output_buffers(plan: &Plan) -> Vec<usize> {
    let mut found: Vec<usize> = plan
        .outputs
        .iter()
        .map(|output| output.buffer)
        .filter(|&i| plan.buffers.get(i).is_some_and(|b| b.kind == BufferKind::Workspace))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The gate, once more on this side: a runner acts on no plan that it hasn't checked itself.
///
/// # Errors
/// `plan`, with node and field.
pub fn admit(plan: &Plan, device: Device) -> Result<(), Fault> {
    if plan.device != device {
        return Err(Fault::new("plan", format!("the plan is for {:?}, this runner is for {device:?}", plan.device)));
    }
    validate(plan, &Limits::default())
        .map_err(|problem| Fault { node: problem.node, ..Fault::new("plan", problem.to_string()) })
}

/// How many descriptors one frame of `buffers` may carry.
pub const BUFFERS_PER_FRAME: usize = MAX_FDS - 10;

/// An IEEE half that lies nearest to `value` (ties to even), as bits.
#[must_use]
pub fn half_bits(value: f64) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 48) & 0x8000) as u16;
    let exponent = ((bits >> 52) & 0x7ff) as i32;
    let mantissa = bits & 0x000f_ffff_ffff_ffff;
    if exponent == 0x7ff {
        return sign | 0x7c00 | if mantissa != 0 { 0x200 } else { 0 };
    }
    let unbiased = exponent - 1023;
    if unbiased > 15 {
        return sign | 0x7c00;
    }
    if unbiased < -25 || exponent == 0 {
        return sign;
    }
    // 53 significant bits; a normal half keeps 11 of them, a subnormal one fewer.
    let significand = mantissa | (1 << 52);
    let drop = if unbiased >= -14 { 42 } else { 42 + (-14 - unbiased) } as u32;
    let kept = significand >> drop;
    let rest = significand & ((1 << drop) - 1);
    let half = 1u64 << (drop - 1);
    let rounded = kept + u64::from(rest > half || (rest == half && kept & 1 == 1));
    // A normal half: the implicit bit adds one to the exponent field, so does a carry.
    let base = if unbiased >= -14 { ((unbiased + 14) as u64) << 10 } else { 0 };
    sign | (base + rounded) as u16
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_rounded_to_nearest_even_with_subnormals_and_overflow() {
        let cases: [(f64, u16); 14] = [
            (0.0, 0),
            (-0.0, 0x8000),
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (65504.0, 0x7bff),
            (65519.0, 0x7bff),
            (65520.0, 0x7c00),
            (1e9, 0x7c00),
            (f64::NEG_INFINITY, 0xfc00),
            (2f64.powi(-24), 1),
            (2f64.powi(-25), 0),
            (2f64.powi(-25) * 1.0001, 1),
            (2f64.powi(-14), 0x0400),
            (0.1, 0x2e66),
        ];
        for (value, bits) in cases {
            assert_eq!(half_bits(value), bits, "{value}");
        }
        assert_eq!(half_bits(1.0 + 2f64.powi(-11)), 0x3c00, "a tie goes to the even neighbour");
        assert_eq!(half_bits(1.0 + 3.0 * 2f64.powi(-11)), 0x3c02);
        assert_eq!(half_bits(f64::NAN) & 0x7c00, 0x7c00);
    }

    #[test]
    fn a_descriptor_can_be_taken_only_once() {
        let file = OwnedFd::from(tempfile::tempfile().expect("a temporary file"));
        let mut fds = Fds::new(vec![file]);
        assert!(fds.take(0).is_ok());
        assert_eq!(fds.take(0).expect_err("taken").code, "request");
        assert_eq!(fds.take(1).expect_err("absent").code, "request");
    }
}
