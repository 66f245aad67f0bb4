//! The CPU runner: loads a candidate's shared library and calls its functions on shared buffers.
//!
//! Once the library is loaded this process is hostile: whatever it answers may be forged, so it makes no
//! buffer (the supervisor owns them all), draws no poison and holds no clock that counts. It must not know
//! seeds, expected outputs or times. Whoever starts it has confined it before.

use std::ffi::{CStr, CString, c_void};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use serde::Deserialize;
use serde_json::Value;

use super::{
    Buffers, Fault, Fds, Load, NodeTime, NullSamples, Reply, Sample, Serve, Shared, SharedBuffer, admit, half_bits,
    parse,
};
use crate::judge::wire::Channel;
use crate::plan::{Arg, BufferKind, Device, Op, Plan};

/// Most arguments of one function.
pub const MAX_ARGS: usize = 64;

/// Integer registers that carry arguments.
const INTEGERS: usize = if cfg!(target_arch = "aarch64") { 8 } else { 6 };
/// Floating registers that carry arguments.
const FLOATS: usize = 8;

/// Serves the supervisor at the other end of `channel` until it closes.
pub fn serve(channel: Channel) -> ! {
    super::serve(channel, &mut Cpu::default())
}

#[derive(Default)]
struct Cpu {
    waiting: Vec<(Buffers, Fds)>,
    loaded: Option<Loaded>,
}

struct Loaded {
    /// Kept mapped for as long as the process lives: the steps hold addresses inside.
    _maps: Vec<Mapping>,
    /// `[slot]`: the plan with addresses filled in.
    steps: Vec<Vec<Step>>,
    helper: Option<UnixStream>,
}

#[derive(Deserialize)]
struct RunBody {
    slot: usize,
}

#[derive(Deserialize)]
struct CountBody {
    #[serde(default)]
    slot: usize,
    count: usize,
}

impl Serve for Cpu {
    fn answer(&mut self, op: &str, body: Value, mut fds: Fds) -> Result<Reply, Fault> {
        match op {
            "hello" => Ok(Reply::default()),
            "buffers" => {
                self.waiting.push((parse(body)?, fds));
                Ok(Reply::default())
            }
            "load" => {
                if self.loaded.is_some() {
                    return Err(Fault::new("request", "a plan is loaded already; an evaluation is a process"));
                }
                let request: Load = parse(body)?;
                self.loaded = Some(load(request, &mut fds, std::mem::take(&mut self.waiting))?);
                Ok(Reply::default())
            }
            "run" => {
                let RunBody { slot } = parse(body)?;
                self.loaded()?.run(slot)?;
                Reply::of(&Sample::default())
            }
            "null" => {
                let CountBody { count, .. } = parse(body)?;
                Reply::of(&NullSamples { time_us: vec![0.0; count.min(10_000)], wall_us: Vec::new() })
            }
            "profile" => {
                let CountBody { slot, count } = parse(body)?;
                let launches = self.loaded()?.profile(slot, count.clamp(1, 1000))?;
                Reply::of(&serde_json::json!({ "launches": launches }))
            }
            other => Err(Fault::new("unsupported", format!("the CPU runner has no operation `{other}`"))),
        }
    }
}

impl Cpu {
    fn loaded(&mut self) -> Result<&mut Loaded, Fault> {
        self.loaded.as_mut().ok_or_else(|| Fault::new("request", "no plan is loaded"))
    }
}

impl Loaded {
    fn run(&mut self, slot: usize) -> Result<(), Fault> {
        let steps = self.steps.get(slot).ok_or_else(|| no_slot(slot))?;
        for step in steps {
            step.act(&mut self.helper)?;
        }
        Ok(())
    }

    /// Median time of each node over `count` runs, by this process's own clock: for a person to think with,
    /// never for a verdict.
    fn profile(&mut self, slot: usize, count: usize) -> Result<Vec<NodeTime>, Fault> {
        let steps = self.steps.get(slot).ok_or_else(|| no_slot(slot))?;
        let mut times = vec![Vec::with_capacity(count); steps.len()];
        for _ in 0..count {
            for (step, times) in steps.iter().zip(&mut times) {
                let start = Instant::now();
                step.act(&mut self.helper)?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(times
            .into_iter()
            .enumerate()
            .map(|(node, mut times)| {
                times.sort_by(f64::total_cmp);
                NodeTime { node, time_us: times.get(times.len() / 2).copied().unwrap_or_default() }
            })
            .collect())
    }
}

fn no_slot(slot: usize) -> Fault {
    Fault::new("request", format!("there is no slot {slot}"))
}

/// One node with its addresses.
enum Step {
    Call { function: *const c_void, frame: Box<CallFrame> },
    Fill { start: *mut u8, bytes: usize, pattern: Vec<u8> },
    Library { node: usize },
}

impl Step {
    fn act(&self, helper: &mut Option<UnixStream>) -> Result<(), Fault> {
        match self {
            Self::Call { function, frame } => {
                // SAFETY: none can be given for what the candidate's function does; this process exists to
                // run it and is confined. The address comes from dlsym, and the convention passes every
                // argument list of at most MAX_ARGS integers, pointers and floating values.
                unsafe { frame.call(*function) };
                Ok(())
            }
            Self::Fill { start, bytes, pattern } => {
                // SAFETY: `load` has checked that `bytes` from `start` lie in one mapping, which lives as
                // long as the process; no Rust reference to it exists.
                unsafe { fill(*start, *bytes, pattern) };
                Ok(())
            }
            Self::Library { node } => call_helper(helper, *node),
        }
    }
}

/// # Safety
/// `bytes` from `start` must be writable, and `bytes` a multiple of the pattern's length.
unsafe fn fill(start: *mut u8, bytes: usize, pattern: &[u8]) {
    let Some(&first) = pattern.first() else { return };
    if pattern.iter().all(|&byte| byte == first) {
        // SAFETY: by the contract of this function.
        unsafe { std::ptr::write_bytes(start, first, bytes) };
        return;
    }
    let done = pattern.len().min(bytes);
    // SAFETY: by the contract of this function; the pattern doesn't lie in a shared buffer.
    unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), start, done) };
    let mut done = done;
    while done < bytes {
        // Doubling keeps the phase, since `done` is a multiple of the pattern's length.
        let more = done.min(bytes - done);
        // SAFETY: source [0, more) and target [done, done + more) don't overlap, both lie within `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(start, start.add(done), more) };
        done += more;
    }
}

fn call_helper(helper: &mut Option<UnixStream>, node: usize) -> Result<(), Fault> {
    let lost = |e: std::io::Error| Fault::new("library_failed", format!("the library helper is gone: {e}")).at(node);
    let Some(socket) = helper else {
        return Err(no_helper(node));
    };
    let index = u32::try_from(node).map_err(|_| Fault::new("plan", "more nodes than 32 bits count").at(node))?;
    socket.write_all(&index.to_le_bytes()).map_err(lost)?;
    let mut status = [0u8; 4];
    socket.read_exact(&mut status).map_err(lost)?;
    match u32::from_le_bytes(status) {
        0 => Ok(()),
        other => Err(Fault::new("library_failed", format!("the library helper answers status {other}")).at(node)),
    }
}

fn no_helper(node: usize) -> Fault {
    Fault::new("no_helper", "the plan calls a library, and `load` brought no socket of the library helper").at(node)
}

/// Arguments as the C calling convention wants them.
#[derive(Clone, Debug, Default, PartialEq)]
struct CallFrame {
    integers: [u64; 8],
    /// Bit patterns, a float in the low 32 bits.
    floats: [u64; FLOATS],
    stack: Vec<u64>,
}

/// A value on its way into a register.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Word {
    Integer(u64),
    Floating(u64),
}

impl CallFrame {
    fn of(words: &[Word]) -> Self {
        let mut frame = Self::default();
        let (mut integers, mut floats) = (0, 0);
        for &word in words {
            match word {
                Word::Integer(bits) if integers < INTEGERS => {
                    frame.integers[integers] = bits;
                    integers += 1;
                }
                Word::Floating(bits) if floats < FLOATS => {
                    frame.floats[floats] = bits;
                    floats += 1;
                }
                Word::Integer(bits) | Word::Floating(bits) => frame.stack.push(bits),
            }
        }
        frame
    }

    /// Calls `function`. Words that it doesn't take are ignored by it: the caller cleans the stack in both
    /// conventions (System V x86-64, AAPCS64), and unused registers are free.
    ///
    /// # Safety
    /// `function` must be the address of a C function.
    unsafe fn call(&self, function: *const c_void) {
        let i = &self.integers;
        let f = self.floats.map(f64::from_bits);
        let s = |n: usize| self.stack.get(n).copied().unwrap_or(0);
        macro_rules! integer {
            ($_n:literal) => {
                u64
            };
        }
        macro_rules! call {
            ([$($r:literal)*] [$($n:literal)*]) => {{
                type Function = unsafe extern "C" fn(
                    $(integer!($r),)* f64, f64, f64, f64, f64, f64, f64, f64, $(integer!($n),)*
                );
                // SAFETY: a data pointer and a function pointer have the same size and form here; the
                // caller vouches that it is a function.
                let function: Function = unsafe { std::mem::transmute::<*const c_void, Function>(function) };
                // SAFETY: as documented above.
                unsafe { function($(i[$r],)* f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], $(s($n),)*) }
            }};
        }
        macro_rules! by_stack {
            ($registers:tt) => {
                match self.stack.len() {
                    0 => call!($registers []),
                    1..=8 => call!($registers [0 1 2 3 4 5 6 7]),
                    9..=16 => call!($registers [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]),
                    _ => call!($registers [
                        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
                        32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59
                    ]),
                }
            };
        }
        #[cfg(target_arch = "x86_64")]
        by_stack!([0 1 2 3 4 5]);
        #[cfg(target_arch = "aarch64")]
        by_stack!([0 1 2 3 4 5 6 7]);
    }
}

/// Turns the arguments of a launch into words.
fn words(args: &[Arg], bases: &[Option<Region>]) -> Result<Vec<Word>, Fault> {
    if args.len() > MAX_ARGS {
        return Err(Fault::new("arguments", format!("{} arguments; at most {MAX_ARGS} can be passed", args.len())));
    }
    args.iter()
        .enumerate()
        .map(|(n, arg)| {
            Ok(match *arg {
                Arg::Pointer { buffer, offset } => {
                    let region = region(bases, buffer)?;
                    if offset > region.bytes {
                        return Err(Fault::new(
                            "arguments",
                            format!(
                                "argument {n}: offset {offset} lies behind the {} bytes of buffer {buffer}",
                                region.bytes
                            ),
                        ));
                    }
                    Word::Integer(region.start as u64 + offset)
                }
                Arg::Null => Word::Integer(0),
                Arg::Int(v) | Arg::I64(v) => Word::Integer(v.cast_unsigned()),
                Arg::I32(v) => Word::Integer(i64::from(v).cast_unsigned()),
                Arg::U32(v) => Word::Integer(u64::from(v)),
                Arg::U8(v) => Word::Integer(u64::from(v)),
                #[allow(clippy::cast_possible_truncation)]
                Arg::Float(v) | Arg::F32(v) => Word::Floating(u64::from((v as f32).to_bits())),
                Arg::F64(v) => Word::Floating(v.to_bits()),
                Arg::F16(v) => Word::Floating(u64::from(half_bits(v))),
            })
        })
        .collect()
}

/// A mapped buffer of the plan.
#[derive(Clone, Copy)]
struct Region {
    start: *mut u8,
    bytes: u64,
}

fn region(bases: &[Option<Region>], buffer: usize) -> Result<Region, Fault> {
    bases
        .get(buffer)
        .copied()
        .flatten()
        .ok_or_else(|| Fault::new("plan", format!("buffer {buffer} was not given to the runner")))
}

/// A shared mapping, populated, so that no page fault falls into a timed region.
struct Mapping {
    start: *mut u8,
    length: usize,
}

impl Mapping {
    /// Maps `bytes` of `fd`.
    fn new(fd: &OwnedFd, bytes: u64, what: &str) -> Result<Self, Fault> {
        let failed = |why: String| Fault::new("memory", format!("{what} ({bytes} bytes) can't be mapped: {why}"));
        // SAFETY: an all-zero `stat` is a valid value of that plain structure.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `fd` is open and `stat` valid for writes.
        if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) } != 0 {
            return Err(failed(std::io::Error::last_os_error().to_string()));
        }
        if u64::try_from(stat.st_size).unwrap_or(0) < bytes {
            return Err(failed(format!("its memory file holds {} bytes", stat.st_size)));
        }
        let length = usize::try_from(bytes.max(1)).map_err(|e| failed(e.to_string()))?;
        if bytes == 0 {
            // An empty tensor still has an address; one private page serves.
            // SAFETY: a new anonymous mapping overlaps nothing.
            let start = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    length,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            if start == libc::MAP_FAILED {
                return Err(failed(std::io::Error::last_os_error().to_string()));
            }
            return Ok(Self { start: start.cast(), length });
        }
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing; the file is at least
        // `length` long (asked above; the supervisor seals its files against shrinking).
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(failed(std::io::Error::last_os_error().to_string()));
        }
        // MAP_POPULATE maps the pages of a shared file readable; this makes the entries writable too. Kernels
        // before 5.14 don't know it, then first writes fault and find the page: slower, not wrong.
        // SAFETY: the range is the mapping made above; the advice changes no content.
        unsafe { libc::madvise(start, length, MADV_POPULATE_WRITE) };
        Ok(Self { start: start.cast(), length })
    }
}

/// `MADV_POPULATE_WRITE` of Linux 5.14.
const MADV_POPULATE_WRITE: libc::c_int = 23;

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made; steps that point inside are dropped with it.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

/// Maps everything, then loads the libraries, then resolves and encodes every call.
fn load(request: Load, fds: &mut Fds, waiting: Vec<(Buffers, Fds)>) -> Result<Loaded, Fault> {
    let Load { plan, images, slots, inputs, buffers, helper, .. } = request;
    admit(&plan, Device::Cpu)?;
    if images.len() != plan.modules.len() {
        return Err(Fault::new("request", format!("{} images for {} modules", images.len(), plan.modules.len())));
    }
    if inputs.len() != slots || slots == 0 {
        return Err(Fault::new("request", format!("{} lists of inputs for {slots} slots", inputs.len())));
    }
    let mut maps = Vec::new();
    let mut shared: Vec<Option<Region>> = vec![None; plan.buffers.len()];
    map_shared(&plan, &buffers, fds, &mut maps, &mut shared)?;
    for (buffers, mut fds) in waiting {
        map_shared(&plan, &buffers, &mut fds, &mut maps, &mut shared)?;
    }
    let mut bases = Vec::with_capacity(slots);
    for slot in &inputs {
        let mut regions: Vec<Option<Region>> = Vec::with_capacity(slot.len());
        for input in slot {
            regions.push(match input {
                Some(shared) => Some(map(*shared, fds, "an input", &mut maps)?),
                None => None,
            });
        }
        let mut filled = shared.clone();
        for (entry, buffer) in filled.iter_mut().zip(&plan.buffers) {
            if let BufferKind::Input(n) = buffer.kind {
                *entry = regions.get(n).copied().flatten();
                if let Some(region) = entry
                    && region.bytes < buffer.bytes
                {
                    return Err(too_small("input", &n.to_string(), region.bytes, buffer.bytes));
                }
            }
        }
        bases.push(filled);
    }
    let helper = match helper {
        Some(index) => Some(UnixStream::from(fds.take(index)?)),
        None => None,
    };
    let images: Vec<OwnedFd> = images.into_iter().map(|i| fds.take(i)).collect::<Result<_, _>>()?;
    // From here on the candidate's code runs in this process (constructors of its libraries).
    let mut libraries = Vec::with_capacity(images.len());
    for (image, module) in images.into_iter().zip(&plan.modules) {
        libraries.push(SharedLibrary::open(image, &module.path)?);
    }
    let steps =
        bases.iter().map(|bases| steps(&plan, bases, &libraries, helper.is_some())).collect::<Result<_, _>>()?;
    Ok(Loaded { _maps: maps, steps, helper })
}

fn too_small(kind: &str, name: &str, has: u64, wants: u64) -> Fault {
    Fault::new("memory", format!("{kind} {name} has {has} bytes, the plan touches {wants}"))
}

fn map(shared: Shared, fds: &mut Fds, what: &str, maps: &mut Vec<Mapping>) -> Result<Region, Fault> {
    let mapping = Mapping::new(&fds.take(shared.fd)?, shared.bytes, what)?;
    let region = Region { start: mapping.start, bytes: shared.bytes };
    maps.push(mapping);
    Ok(region)
}

fn map_shared(
    plan: &Plan,
    given: &Buffers,
    fds: &mut Fds,
    maps: &mut Vec<Mapping>,
    shared: &mut [Option<Region>],
) -> Result<(), Fault> {
    for (name, parameter) in &given.parameters {
        let region = map(*parameter, fds, &format!("parameter `{name}`"), maps)?;
        for (entry, buffer) in shared.iter_mut().zip(&plan.buffers) {
            if matches!(&buffer.kind, BufferKind::Parameter(n) if n == name) {
                if region.bytes < buffer.bytes {
                    return Err(too_small("parameter", name, region.bytes, buffer.bytes));
                }
                *entry = Some(region);
            }
        }
    }
    for &SharedBuffer { buffer, fd, bytes } in &given.buffers {
        let region = map(Shared { fd, bytes }, fds, &format!("buffer {buffer}"), maps)?;
        let (Some(entry), Some(planned)) = (shared.get_mut(buffer), plan.buffers.get(buffer)) else {
            return Err(Fault::new("request", format!("the plan has no buffer {buffer}")));
        };
        if bytes < planned.bytes {
            return Err(too_small("buffer", &buffer.to_string(), bytes, planned.bytes));
        }
        *entry = Some(region);
    }
    Ok(())
}

fn steps(plan: &Plan, bases: &[Option<Region>], libraries: &[SharedLibrary], helped: bool) -> Result<Vec<Step>, Fault> {
    plan.nodes
        .iter()
        .enumerate()
        .map(|(node, step)| match &step.op {
            Op::Launch(launch) => {
                let library = libraries
                    .get(launch.module)
                    .ok_or_else(|| Fault::new("plan", format!("there is no module {}", launch.module)).at(node))?;
                let function = library.symbol(&launch.kernel).map_err(|f| f.at(node).of(&launch.kernel))?;
                let words = words(&launch.args, bases).map_err(|f| f.at(node).of(&launch.kernel))?;
                Ok(Step::Call { function, frame: Box::new(CallFrame::of(&words)) })
            }
            Op::Fill(fill) => {
                let region = region(bases, fill.buffer).map_err(|f| f.at(node))?;
                let inside = fill.offset.checked_add(fill.bytes).is_some_and(|end| end <= region.bytes);
                let width = fill.pattern.len() as u64;
                if !inside || !matches!(width, 1 | 2 | 4 | 8) || !fill.bytes.is_multiple_of(width) {
                    let why = "a fill leaves its buffer or has a pattern of a wrong length";
                    return Err(Fault::new("plan", why).at(node));
                }
                let bytes = usize::try_from(fill.bytes).map_err(|e| Fault::new("plan", e.to_string()).at(node))?;
                let offset = usize::try_from(fill.offset).map_err(|e| Fault::new("plan", e.to_string()).at(node))?;
                // SAFETY: `offset + bytes` is within the mapping, asked above.
                let start = unsafe { region.start.add(offset) };
                Ok(Step::Fill { start, bytes, pattern: fill.pattern.clone() })
            }
            Op::Library(_) if helped => Ok(Step::Library { node }),
            Op::Library(_) => Err(no_helper(node)),
        })
        .collect()
}

/// A library of the candidate, open until the process ends.
struct SharedLibrary {
    handle: *mut c_void,
    path: String,
    exports: Vec<String>,
    _memory: std::fs::File,
}

impl SharedLibrary {
    /// Copies the image into a memory file of this process, which no path restriction hides, and loads it.
    fn open(image: OwnedFd, path: &str) -> Result<Self, Fault> {
        let failed = |why: String| Fault::new("image", format!("the library of {path} can't be loaded: {why}"));
        let mut source = std::fs::File::from(image);
        let mut bytes = Vec::new();
        // The descriptor shares its position with the supervisor's; rewind both ends of the copy.
        std::io::Seek::rewind(&mut source).map_err(|e| failed(e.to_string()))?;
        source.read_to_end(&mut bytes).map_err(|e| failed(e.to_string()))?;
        // SAFETY: the name is a valid C string; the call makes a new descriptor.
        let raw = unsafe { libc::memfd_create(c"candidate".as_ptr(), libc::MFD_CLOEXEC) };
        if raw < 0 {
            return Err(failed(std::io::Error::last_os_error().to_string()));
        }
        // SAFETY: `raw` was just made and belongs to nobody else.
        let memory = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(raw) };
        let mut memory = std::fs::File::from(memory);
        memory.write_all(&bytes).map_err(|e| failed(e.to_string()))?;
        let name = CString::new(format!("/proc/self/fd/{}", memory.as_raw_fd())).map_err(|e| failed(e.to_string()))?;
        // The runner itself was started by an exec, so its filter allows one; the candidate gets none.
        crate::sandbox::seccomp::forbid_programs().map_err(|e| failed(format!("can't be confined: {e}")))?;
        // SAFETY: `name` is a valid C string. Loading runs the library's constructors: hostile, as expected here.
        // The descriptor stays open: a number used again would be a name that the loader believes it knows.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(failed(last_dl_error().replace(&*name.to_string_lossy(), path)));
        }
        Ok(Self { handle, path: path.to_owned(), exports: exported_functions(&bytes), _memory: memory })
    }

    fn symbol(&self, name: &str) -> Result<*const c_void, Fault> {
        let found = CString::new(name).ok().map(|name| {
            // SAFETY: the handle is open for the life of the process, `name` a valid C string.
            unsafe { libc::dlsym(self.handle, name.as_ptr()) }
        });
        match found {
            Some(address) if !address.is_null() => Ok(address.cast_const()),
            _ => {
                let exports = if self.exports.is_empty() { "none".to_owned() } else { self.exports.join(", ") };
                Err(Fault::new(
                    "symbol",
                    format!(
                        "{} exports no function `{name}`; it exports: {exports}. Is it declared `extern \"C\"`?",
                        self.path
                    ),
                ))
            }
        }
    }
}

fn last_dl_error() -> String {
    // SAFETY: dlerror returns null or a C string that stays valid until the next call of this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: not null, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Names of the global functions that an ELF library defines, sorted, at most 64: for a message. Reads
/// nothing that isn't in `image`, whatever its headers say.
fn exported_functions(image: &[u8]) -> Vec<String> {
    fn number<const N: usize>(image: &[u8], at: usize) -> Option<u64> {
        let bytes = image.get(at..at.checked_add(N)?)?;
        let mut wide = [0u8; 8];
        wide.get_mut(..N)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(wide))
    }
    fn inner(image: &[u8]) -> Option<Vec<String>> {
        const DYNSYM: u64 = 11;
        let table = usize::try_from(number::<8>(image, 0x28)?).ok()?;
        let size = usize::try_from(number::<2>(image, 0x3a)?).ok()?;
        let count = usize::try_from(number::<2>(image, 0x3c)?).ok()?;
        let section = |n: usize| table.checked_add(n.checked_mul(size)?);
        let field = |n: usize, at: usize| usize::try_from(number::<8>(image, section(n)?.checked_add(at)?)?).ok();
        let mut names = Vec::new();
        for n in 0..count {
            if number::<4>(image, section(n)?.checked_add(4)?)? != DYNSYM {
                continue;
            }
            let (start, length) = (field(n, 0x18)?, field(n, 0x20)?);
            let strings = usize::try_from(number::<4>(image, section(n)?.checked_add(0x28)?)?).ok()?;
            let strings = field(strings, 0x18)?;
            for symbol in 0..(length / 24).min(100_000) {
                let at = start.checked_add(symbol * 24)?;
                let info = number::<1>(image, at.checked_add(4)?)?;
                let defined = number::<2>(image, at.checked_add(6)?)? != 0;
                // Global or weak functions.
                if defined && info & 0xf == 2 && matches!(info >> 4, 1 | 2) {
                    let name = strings.checked_add(usize::try_from(number::<4>(image, at)?).ok()?)?;
                    let rest = image.get(name..)?;
                    let end = rest.iter().take(256).position(|&b| b == 0)?;
                    names.push(String::from_utf8_lossy(&rest[..end]).into_owned());
                }
            }
        }
        names.retain(|name| name != "_init" && name != "_fini");
        names.sort();
        names.truncate(64);
        Some(names)
    }
    if image.get(..6) != Some(b"\x7fELF\x02\x01".as_slice()) {
        return Vec::new();
    }
    inner(image).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_go_to_registers_by_class_and_then_to_the_stack_in_order() {
        let mut list = Vec::new();
        for n in 0..10 {
            list.push(Word::Integer(n));
            list.push(Word::Floating(100 + n));
        }
        let frame = CallFrame::of(&list);
        assert_eq!(frame.floats, [100, 101, 102, 103, 104, 105, 106, 107]);
        let spilled: Vec<u64> = if INTEGERS == 6 { vec![6, 7, 8, 108, 9, 109] } else { vec![8, 108, 9, 109] };
        assert_eq!(frame.stack, spilled);
    }

    #[test]
    fn a_fill_repeats_its_pattern_to_the_last_element() {
        for bytes in [0usize, 8, 16, 24, 1000] {
            let mut memory = vec![0xffu8; bytes + 8];
            let pattern = [1, 2, 3, 4, 5, 6, 7, 8];
            // SAFETY: `memory` holds `bytes` and 8 more.
            unsafe { fill(memory.as_mut_ptr(), bytes, &pattern) };
            assert!(memory[..bytes].chunks(8).all(|c| c == pattern));
            assert!(memory[bytes..].iter().all(|&b| b == 0xff), "nothing behind the fill is touched");
        }
    }

    #[test]
    fn a_broken_image_yields_no_names_and_no_panic() {
        let mut image = vec![0xffu8; 4096];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        assert!(exported_functions(&image).is_empty());
        assert!(exported_functions(b"\x7fELF").is_empty());
    }
}
