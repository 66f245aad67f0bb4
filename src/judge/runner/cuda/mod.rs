//! The CUDA runner: replays a plan as a graph on fresh inputs and times it.
//!
//! This process is trusted, the device code in it is not: it never sees expected outputs or the verdict's
//! clock beyond its own events, maps one input set at a time, and overwrites workspaces, outputs, shared
//! memory and L2 before each sample. Whoever sent the images has admitted them. It must not know what a time
//! means.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use cudarc::driver::sys;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Arithmetic, Buffers, Constants, Fault, Fds, Item, LaunchInfo, Load, NodeTime, NullSamples, Reply, Sample, Serve,
    Shared, SharedBuffer, admit, output_buffers, parse,
};
use crate::judge::wire::Channel;
use crate::plan::{BufferKind, Device, Dtype, Fill, Library, Op, Plan, TensorRef};

mod backend;
mod conv;
mod driver;
pub mod facts;
mod launch;
mod library;
mod matmul;
mod memory;
pub mod selftest;

pub use driver::DeviceInfo;
use driver::{Context, Graph, Module, check, size};
use memory::{Allocation, Physical, Range, granularity};

/// Serves the supervisor at the other end of `channel` until it closes. The context is made at once, so that
/// a process from a pool is ready when it is asked.
pub fn serve(channel: Channel) -> ! {
    // Without it a refused call ends the process, which is told too.
    let _ = crate::sandbox::refused::watch();
    let mut cuda = Cuda { bench: Bench::new(), loaded: None, waiting: Vec::new(), lost: None };
    super::serve(channel, &mut cuda)
}

struct Cuda {
    /// Dropped before `bench`, whose context everything in it needs.
    loaded: Option<Loaded>,
    bench: Result<Bench, Fault>,
    waiting: Vec<(Buffers, Fds)>,
    /// What killed the context.
    lost: Option<Fault>,
}

#[derive(Deserialize)]
struct SlotBody {
    slot: usize,
    #[serde(default)]
    seed: u64,
}

#[derive(Deserialize)]
struct CountBody {
    #[serde(default)]
    slot: usize,
    count: usize,
}

#[derive(Deserialize)]
struct SnapshotBody {
    #[serde(default)]
    buffers: Vec<usize>,
}

impl Serve for Cuda {
    fn answer(&mut self, op: &str, body: Value, fds: Fds) -> Result<Reply, Fault> {
        if let Some(fault) = &self.lost {
            return Err(Fault::new("lost", format!("the context died earlier: {fault}")));
        }
        let result = self.act(op, body, fds);
        if let (Err(fault), Ok(bench)) = (&result, &self.bench)
            && bench.context.wait("after a fault").is_err()
        {
            self.lost = Some(fault.clone());
        }
        result
    }
}

impl Cuda {
    fn act(&mut self, op: &str, body: Value, mut fds: Fds) -> Result<Reply, Fault> {
        let bench = self.bench.as_mut().map_err(|fault| fault.clone())?;
        let loaded = || Fault::new("request", "no plan is loaded");
        match op {
            "hello" => Ok(Reply::default()),
            "device" => Reply::of(&bench.context.info()?),
            "copy_rate" => Reply::of(&json!({"copy_gbps": bench.copy_rate()?})),
            "null" => {
                let CountBody { count, .. } = parse(body)?;
                Reply::of(&bench.null(count.clamp(1, 10_000))?)
            }
            "buffers" => {
                self.waiting.push((parse(body)?, fds));
                Ok(Reply::default())
            }
            "load" => {
                if self.loaded.is_some() {
                    return Err(Fault::new("request", "a plan is loaded already; `unload` it first"));
                }
                let request: Load = parse(body)?;
                let (loaded, launches) = Loaded::new(bench, request, fds, std::mem::take(&mut self.waiting))?;
                let reply = loaded.exports(&launches)?;
                self.loaded = Some(loaded);
                Ok(reply)
            }
            "unload" => {
                bench.context.wait("ending the last plan")?;
                self.loaded = None;
                self.waiting.clear();
                bench.renew()?;
                Ok(Reply::default())
            }
            "constants" => {
                let constants: Constants = parse(body)?;
                let loaded = self.loaded.as_mut().ok_or_else(loaded)?;
                loaded.write_constants(&fds.take(constants.fd)?.into(), &constants.items)?;
                Ok(Reply::default())
            }
            "run" => {
                let SlotBody { slot, seed } = parse(body)?;
                Reply::of(&self.loaded.as_mut().ok_or_else(loaded)?.run(bench, slot, seed)?)
            }
            "attribute" => {
                let SlotBody { slot, seed } = parse(body)?;
                self.loaded.as_mut().ok_or_else(loaded)?.attribute(bench, slot, seed)?;
                Ok(Reply::default())
            }
            "observe" => {
                let SlotBody { slot, seed } = parse(body)?;
                self.loaded.as_mut().ok_or_else(loaded)?.observe(bench, slot, seed)?;
                Ok(Reply::default())
            }
            "profile" => {
                let CountBody { slot, count } = parse(body)?;
                let times = self.loaded.as_mut().ok_or_else(loaded)?.profile(bench, slot, count.clamp(1, 1000))?;
                Reply::of(&json!({ "launches": times }))
            }
            "reload" => {
                self.loaded.as_mut().ok_or_else(loaded)?.reload(bench)?;
                Ok(Reply::default())
            }
            "snapshot" => {
                let SnapshotBody { buffers } = parse(body)?;
                self.loaded.as_ref().ok_or_else(loaded)?.snapshot(bench, buffers)
            }
            other => Err(Fault::new("unsupported", format!("the CUDA runner has no operation `{other}`"))),
        }
    }
}

/// Memory of the context that no other process sees.
struct Private {
    address: u64,
    bytes: u64,
}

impl Private {
    fn new(bytes: u64) -> Result<Self, Fault> {
        let bytes = bytes.max(256);
        let mut address = 0;
        // SAFETY: `address` is valid for a write.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, size(bytes)?) };
        check(result, &format!("allocating {bytes} bytes"))?;
        Ok(Self { address, bytes })
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// What is there before a plan: the context, noise, the flush, the empty plan.
struct Bench {
    empty: Graph,
    flush: Private,
    sink: Private,
    noise: Noise,
    image: Vec<u8>,
    step: u64,
    context: Context,
}

/// The kernels that overwrite memory.
struct Noise {
    fill: sys::CUfunction,
    scrub: sys::CUfunction,
    scrub_bytes: u32,
    _module: Module,
}

impl Noise {
    /// `image`: of `noise.cu`, for this card.
    fn new(context: &Context, image: &[u8]) -> Result<Self, Fault> {
        let module = Module::load(image, "loading the noise kernels")?;
        let (fill, scrub) = (module.function("kernelfleet_noise")?, module.function("kernelfleet_scrub")?);
        let scrub_bytes = context.info.shared_memory_per_block_optin;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: `scrub` belongs to the module loaded above; it has no static shared memory.
        check(unsafe { sys::cuFuncSetAttribute(scrub, which, scrub_bytes) }, "asking for all shared memory")?;
        Ok(Self { fill, scrub, scrub_bytes: u32::try_from(scrub_bytes).unwrap_or(0), _module: module })
    }
}

/// What noise looks like (`noise.cu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind(u32);

impl Kind {
    const fn of(dtype: Dtype) -> Self {
        Self(match dtype {
            Dtype::Float32 => 0,
            Dtype::Float16 => 1,
            Dtype::Bfloat16 => 2,
            Dtype::Float64 => 3,
            Dtype::Int64 => 4,
            Dtype::Int32 => 5,
            Dtype::Int16 => 6,
            Dtype::Int8 | Dtype::Uint8 => 7,
            Dtype::Bool => 8,
        })
    }
}

impl Bench {
    fn new() -> Result<Self, Fault> {
        let context = Context::new()?;
        let l2 = u64::try_from(context.info.l2_cache_size).unwrap_or(0);
        let image = driver::assemble(include_bytes!("noise.ptx"))?;
        Ok(Self {
            empty: Graph::capture(&context, || Ok(()))?,
            flush: Private::new((2 * l2).max(32 << 20))?,
            sink: Private::new(256)?,
            noise: Noise::new(&context, &image)?,
            image,
            step: granularity(context.device)?,
            context,
        })
    }

    /// Makes anew what device code of a plan could have written over, so that the next plan meets none of it: the code of the
    /// judge's own kernels. What lies in the memory that they write says nothing.
    fn renew(&mut self) -> Result<(), Fault> {
        self.empty = Graph::capture(&self.context, || Ok(()))?;
        self.noise = Noise::new(&self.context, &self.image)?;
        Ok(())
    }

    fn launch(
        &self,
        function: sys::CUfunction,
        blocks: u32,
        shared: u32,
        mut args: [*mut std::ffi::c_void; 4],
    ) -> Result<(), Fault> {
        // SAFETY: both kernels of `noise.cu` take at most four parameters, of the types that the callers point
        // to; entries past the last are not read. The driver copies them before it returns.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                256,
                1,
                1,
                shared,
                self.context.stream,
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(result, "launching noise")
    }

    fn multiprocessors(&self) -> u32 {
        u32::try_from(self.context.info.multi_processor_count).unwrap_or(1).max(1)
    }

    /// Fills `bytes` (a multiple of 4) from `address`.
    fn fill_noise(&self, address: u64, bytes: u64, seed: u32, kind: Kind) -> Result<(), Fault> {
        let (mut address, mut words, mut seed, mut kind) = (address, bytes / 4, seed, kind.0);
        let args = [(&raw mut address).cast(), (&raw mut words).cast(), (&raw mut seed).cast(), (&raw mut kind).cast()];
        let blocks = u32::try_from(words.div_ceil(256)).unwrap_or(u32::MAX).clamp(1, self.multiprocessors() * 16);
        self.launch(self.noise.fill, blocks, 0, args)
    }

    /// Overwrites shared memory of every multiprocessor: a block takes all of it, and there are enough blocks
    /// that none stays without.
    fn scrub_shared(&self, seed: u32) -> Result<(), Fault> {
        let (mut sink, mut words, mut seed) = (self.sink.address, self.noise.scrub_bytes / 4, seed);
        let args = [(&raw mut sink).cast(), (&raw mut words).cast(), (&raw mut seed).cast(), std::ptr::null_mut()];
        self.launch(self.noise.scrub, self.multiprocessors() * 4, self.noise.scrub_bytes, args)
    }

    /// One sample of `graph`. L2 is flushed on the stream just before, so that the device is busy while the
    /// host launches, and the events see device time alone.
    fn sample(&self, graph: &Graph, seed: u64) -> Result<Sample, Fault> {
        // SAFETY: takes nothing; acts on the current context. A card that can't hold lines can't reset them.
        let reset = unsafe { sys::cuCtxResetPersistingL2Cache() };
        if reset != sys::CUresult::CUDA_ERROR_NOT_SUPPORTED {
            check(reset, "resetting persisting lines of L2")?;
        }
        self.context.wait("preparing a sample")?;
        let start = Instant::now();
        self.context.set_bytes(self.flush.address, seed.to_le_bytes()[0], self.flush.bytes)?;
        let time_us = self.context.timed(|| graph.launch(&self.context))?;
        Ok(Sample { time_us, wall_us: start.elapsed().as_secs_f64() * 1e6 })
    }

    fn null(&self, count: usize) -> Result<NullSamples, Fault> {
        let mut all = NullSamples::default();
        for n in 0..count {
            let sample = self.sample(&self.empty, n as u64)?;
            all.time_us.push(sample.time_us);
            all.wall_us.push(sample.wall_us);
        }
        Ok(all)
    }

    /// Bytes read and written a second by a large copy, in 1e9: the best of five.
    fn copy_rate(&self) -> Result<f64, Fault> {
        let (free, _) = driver::memory()?;
        let bytes = (free / 4).min(1 << 30) & !255;
        let (from, to) = (Private::new(bytes)?, Private::new(bytes)?);
        let mut best = f64::INFINITY;
        for _ in 0..6 {
            let time = self.context.timed(|| {
                // SAFETY: both have `bytes` and don't overlap.
                let result =
                    unsafe { sys::cuMemcpyDtoDAsync_v2(to.address, from.address, size(bytes)?, self.context.stream) };
                check(result, "copying memory")
            })?;
            best = best.min(time);
        }
        #[allow(clippy::cast_precision_loss)]
        Ok(2.0 * bytes as f64 / (best * 1e-6) / 1e9)
    }
}

/// One node, ready for the stream.
enum Action {
    Launch(launch::Ready),
    Fill(Fill, u64),
    Matmul(matmul::Matmul),
    Conv(conv::Conv),
    /// A library call whose output is empty.
    Nothing,
}

/// A workspace or a constant.
struct Owned {
    buffer: usize,
    allocation: Allocation,
    /// Noise of this kind before each sample; constants have none.
    noise: Option<Kind>,
    exported: bool,
}

/// A plan on the device.
struct Loaded {
    /// Dropped first: it refers to everything below.
    graph: Option<Graph>,
    actions: Vec<Action>,
    modules: Vec<Module>,
    libraries: library::Libraries,
    scratch: Private,
    owned: Vec<Owned>,
    _parameters: Vec<Allocation>,
    /// `[input]`: where it is mapped.
    ranges: Vec<Option<Range>>,
    /// `[slot][input]`.
    slots: Vec<Vec<Option<Physical>>>,
    mapped: Option<usize>,
    /// `[buffer]`: address, 0 where the plan has no such buffer.
    addresses: Vec<u64>,
    images: Vec<Vec<u8>>,
    plan: Plan,
    arithmetic: Arithmetic,
}

impl Loaded {
    fn new(
        bench: &Bench,
        request: Load,
        mut fds: Fds,
        waiting: Vec<(Buffers, Fds)>,
    ) -> Result<(Self, Vec<LaunchInfo>), Fault> {
        let Load { plan, images, slots, inputs, buffers, constants, libraries, precision, seed: _, helper: _ } =
            request;
        admit(&plan, Device::Cuda)?;
        if images.len() != plan.modules.len() || inputs.len() != slots || slots == 0 {
            return Err(Fault::new("request", "images, modules, slots and inputs don't agree in number"));
        }
        let mut addresses = vec![0u64; plan.buffers.len()];
        let mut parameters = Vec::new();
        import_parameters(bench, &plan, &buffers, &mut fds, &mut parameters, &mut addresses)?;
        for (buffers, mut fds) in waiting {
            import_parameters(bench, &plan, &buffers, &mut fds, &mut parameters, &mut addresses)?;
        }
        let (ranges, slots) = import_inputs(bench, &plan, &inputs, &mut fds, &mut addresses)?;
        let images = images.into_iter().map(|i| read_all(fds.take(i)?)).collect::<Result<Vec<_>, _>>()?;
        let owned = allocate(bench, &plan, &mut addresses)?;
        if let Some(missing) = addresses.iter().position(|&address| address == 0) {
            return Err(Fault::new(
                "request",
                format!("buffer {missing} was not given ({:?})", plan.buffers[missing].kind),
            ));
        }
        let mut loaded = Self {
            graph: None,
            actions: Vec::new(),
            modules: Vec::new(),
            libraries: library::Libraries::new(libraries),
            scratch: Private::new(256)?,
            owned,
            _parameters: parameters,
            ranges,
            slots,
            mapped: None,
            addresses,
            images,
            plan,
            arithmetic: precision,
        };
        if let Some(constants) = constants {
            loaded.write_constants(&File::from(fds.take(constants.fd)?), &constants.items)?;
        } else if loaded.plan.buffers.iter().any(|b| matches!(b.kind, BufferKind::Constant(_))) {
            return Err(Fault::new("request", "the plan has derived constants, and `load` brought none"));
        }
        loaded.map_slot(bench, 0)?;
        let launches = loaded.prepare(bench)?;
        Ok((loaded, launches))
    }

    /// Loads the modules, makes every node ready and captures the graph.
    fn prepare(&mut self, bench: &Bench) -> Result<Vec<LaunchInfo>, Fault> {
        for (image, module) in self.images.iter().zip(&self.plan.modules) {
            self.modules.push(Module::load(image, &format!("loading the image of {}", module.path))?);
        }
        let mut infos = Vec::new();
        let fresh = self.actions.is_empty();
        let plan = self.plan.clone();
        for (node, step) in plan.nodes.iter().enumerate() {
            let action = match &step.op {
                Op::Launch(launch) => {
                    let module = self
                        .modules
                        .get(launch.module)
                        .ok_or_else(|| Fault::new("plan", format!("there is no module {}", launch.module)).at(node))?;
                    let address = |buffer: usize| self.addresses.get(buffer).copied();
                    check_pointers(&plan, launch).map_err(|f| f.at(node).of(&launch.kernel))?;
                    let (ready, info) = launch::Ready::new(&bench.context, module, launch, node, address)?;
                    infos.push(info);
                    Action::Launch(ready)
                }
                Op::Fill(fill) => {
                    if !fill_is_sound(&plan, fill) {
                        let why = "a fill leaves its buffer, isn't aligned to its element or has a wrong pattern";
                        return Err(Fault::new("plan", why).at(node));
                    }
                    let start = self.addresses.get(fill.buffer).copied().unwrap_or(0);
                    Action::Fill(fill.clone(), start + fill.offset)
                }
                // Library calls survive a reload: nothing of the candidate is in them.
                Op::Library(_) if !fresh => continue,
                Op::Library(call) => self.prepare_library(bench, call).map_err(|f| f.at(node))?,
            };
            if fresh {
                self.actions.push(action);
            } else if let Some(entry) = self.actions.get_mut(node) {
                *entry = action;
            }
        }
        let graph =
            Graph::capture(&bench.context, || (0..self.actions.len()).try_for_each(|node| self.issue(bench, node)))?;
        self.graph = Some(graph);
        Ok(infos)
    }

    fn prepare_library(&mut self, bench: &Bench, call: &Library) -> Result<Action, Fault> {
        let Self { plan, addresses, libraries, scratch, arithmetic, .. } = self;
        let at = |tensor: &TensorRef| tensor_address(plan, addresses, tensor);
        // A trial may write where only noise is. It may not where inputs or parameters are.
        let scribble = |out: &TensorRef| plan.buffers.get(out.buffer).is_some_and(|b| b.kind == BufferKind::Workspace);
        let mut room = |bytes: u64| -> Result<u64, Fault> {
            if scratch.bytes < bytes {
                bench.context.wait("growing the scratch memory")?;
                *scratch = Private::new(bytes)?;
            }
            Ok(scratch.address)
        };
        match call {
            Library::Matmul { a, b, bias, out } => {
                let operands = (a, b, bias.as_ref(), out);
                let Some(matmul) = matmul::Matmul::new(libraries, operands, *arithmetic, at)? else {
                    return Ok(Action::Nothing);
                };
                let memory = room(matmul::WORKSPACE)?;
                if scribble(out) {
                    // The first call loads the library's kernel, which must not happen in a timed region.
                    matmul.issue(libraries, memory, bench.context.stream.cast())?;
                    bench.context.wait("trying a matrix product")?;
                }
                Ok(Action::Matmul(matmul))
            }
            Library::Conv {
                x,
                weight,
                bias,
                out,
                stride,
                padding,
                dilation,
                groups: _,
                transposed,
                output_padding: _,
            } => {
                let request = conv::Request {
                    x,
                    weight,
                    bias: bias.as_ref(),
                    out,
                    stride,
                    padding,
                    dilation,
                    transposed: *transposed,
                };
                let trial = scribble(out);
                let conv = conv::Conv::new(libraries, &bench.context, &request, *arithmetic, at, &mut room, trial)?;
                Ok(conv.map_or(Action::Nothing, Action::Conv))
            }
        }
    }

    /// Puts one node on the stream.
    fn issue(&self, bench: &Bench, node: usize) -> Result<(), Fault> {
        let Some(action) = self.actions.get(node) else { return Ok(()) };
        let stream = bench.context.stream;
        let result = match action {
            Action::Launch(ready) => ready.issue(stream),
            Action::Fill(fill, address) => issue_fill(fill, *address, stream),
            Action::Matmul(matmul) => matmul.issue(&self.libraries, self.scratch.address, stream.cast()),
            Action::Conv(conv) => conv.issue(&self.libraries, self.scratch.address),
            Action::Nothing => Ok(()),
        };
        result.map_err(|fault| self.named(fault, node))
    }

    fn named(&self, fault: Fault, node: usize) -> Fault {
        match self.plan.nodes.get(node).map(|n| &n.op) {
            Some(Op::Launch(launch)) => fault.at(node).of(&launch.kernel),
            _ => fault.at(node),
        }
    }

    fn map_slot(&mut self, bench: &Bench, slot: usize) -> Result<(), Fault> {
        if self.mapped == Some(slot) {
            return Ok(());
        }
        let Some(inputs) = self.slots.get(slot) else {
            return Err(Fault::new("request", format!("there is no slot {slot}")));
        };
        bench.context.wait("changing the inputs")?;
        self.mapped = None;
        for (range, memory) in self.ranges.iter_mut().zip(inputs) {
            if let (Some(range), Some(memory)) = (range, memory) {
                range.map(memory, true)?;
            }
        }
        self.mapped = Some(slot);
        Ok(())
    }

    /// Noise over everything that the plan must write before it reads.
    fn poison(&self, bench: &Bench, seed: u64) -> Result<(), Fault> {
        let fold = |n: usize| {
            let mixed = (seed ^ (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
            (mixed >> 32) as u32
        };
        for owned in &self.owned {
            if let Some(kind) = owned.noise {
                let allocation = &owned.allocation;
                bench.fill_noise(allocation.address(), allocation.memory.size, fold(owned.buffer), kind)?;
            }
        }
        bench.fill_noise(self.scratch.address, self.scratch.bytes & !3, fold(usize::MAX), Kind(0))?;
        bench.scrub_shared(fold(usize::MAX - 1))
    }

    fn run(&mut self, bench: &Bench, slot: usize, seed: u64) -> Result<Sample, Fault> {
        self.map_slot(bench, slot)?;
        self.poison(bench, seed)?;
        let graph = self.graph.as_ref().ok_or_else(|| Fault::new("internal", "the plan has no graph"))?;
        bench.sample(graph, seed)
    }

    fn attribute(&mut self, bench: &Bench, slot: usize, seed: u64) -> Result<(), Fault> {
        self.map_slot(bench, slot)?;
        self.poison(bench, seed)?;
        bench.context.wait("poisoning")?;
        for node in 0..self.actions.len() {
            self.issue(bench, node)?;
            bench.context.wait("running a node").map_err(|fault| self.named(fault, node))?;
        }
        Ok(())
    }

    /// As `attribute`, where a profiler looks that this process was started under.
    fn observe(&mut self, bench: &Bench, slot: usize, seed: u64) -> Result<(), Fault> {
        self.map_slot(bench, slot)?;
        self.poison(bench, seed)?;
        bench.context.wait("poisoning")?;
        // SAFETY: takes nothing; without a profiler it does nothing.
        check(unsafe { sys::cuProfilerStart() }, "starting the profiler")?;
        let done = (0..self.actions.len()).try_for_each(|node| {
            self.issue(bench, node)?;
            bench.context.wait("running a node").map_err(|fault| self.named(fault, node))
        });
        // SAFETY: as above.
        check(unsafe { sys::cuProfilerStop() }, "stopping the profiler")?;
        done
    }

    fn profile(&mut self, bench: &Bench, slot: usize, count: usize) -> Result<Vec<NodeTime>, Fault> {
        self.map_slot(bench, slot)?;
        self.poison(bench, 0)?;
        let mut times = vec![Vec::with_capacity(count); self.actions.len()];
        for round in 0..count {
            for (node, times) in times.iter_mut().enumerate() {
                bench.context.set_bytes(bench.flush.address, round.to_le_bytes()[0], bench.flush.bytes)?;
                let time = bench.context.timed(|| self.issue(bench, node));
                times.push(time.map_err(|fault| self.named(fault, node))?);
            }
        }
        let median = |mut list: Vec<f64>| {
            list.sort_by(f64::total_cmp);
            list.get(list.len() / 2).copied().unwrap_or_default()
        };
        Ok(times.into_iter().enumerate().map(|(node, list)| NodeTime { node, time_us: median(list) }).collect())
    }

    /// Unloads the candidate's images and loads them again, so that their globals are as at the start.
    fn reload(&mut self, bench: &Bench) -> Result<(), Fault> {
        bench.context.wait("reloading the modules")?;
        self.graph = None;
        self.modules.clear();
        self.prepare(bench).map(|_| ())
    }

    fn write_constants(&mut self, file: &File, items: &[Item]) -> Result<(), Fault> {
        let mut block = vec![0u8; 16 << 20];
        for owned in &self.owned {
            let Some(BufferKind::Constant(n)) = self.plan.buffers.get(owned.buffer).map(|b| &b.kind) else { continue };
            let item = items.get(*n).ok_or_else(|| Fault::new("request", format!("constant {n} is missing")))?;
            let planned = self.plan.buffers.get(owned.buffer).map_or(0, |b| b.bytes);
            if item.bytes != planned {
                let why = format!("constant {n} has {} bytes, the plan says {planned}", item.bytes);
                return Err(Fault::new("request", why));
            }
            let mut done = 0;
            while done < item.bytes {
                let length = size((item.bytes - done).min(block.len() as u64))?;
                let Some(part) = block.get_mut(..length) else { break };
                file.read_exact_at(part, item.offset + done)
                    .map_err(|e| Fault::new("request", format!("constant {n} can't be read: {e}")))?;
                // SAFETY: `part` holds `length` bytes, the allocation at least `planned`.
                let result =
                    unsafe { sys::cuMemcpyHtoD_v2(owned.allocation.address() + done, part.as_ptr().cast(), length) };
                check(result, "copying a derived constant")?;
                done += length as u64;
            }
        }
        // SAFETY: takes nothing. The copies above are on another stream than the plan's.
        check(unsafe { sys::cuCtxSynchronize() }, "copying derived constants")
    }

    fn exports(&self, launches: &[LaunchInfo]) -> Result<Reply, Fault> {
        let mut fds = Vec::new();
        let mut outputs = Vec::new();
        for owned in self.owned.iter().filter(|owned| owned.exported) {
            outputs.push(SharedBuffer { buffer: owned.buffer, fd: fds.len(), bytes: owned.allocation.memory.size });
            fds.push(owned.allocation.memory.export()?);
        }
        let mut reply = Reply::of(&json!({"outputs": outputs, "launches": launches}))?;
        reply.fds = fds;
        Ok(reply)
    }

    fn snapshot(&self, bench: &Bench, buffers: Vec<usize>) -> Result<Reply, Fault> {
        let all = || self.owned.iter().filter(|o| o.noise.is_none()).map(|o| o.buffer).collect();
        let buffers: Vec<usize> = if buffers.is_empty() { all() } else { buffers };
        let (mut list, mut fds) = (Vec::new(), Vec::new());
        for buffer in buffers {
            let owned = self.owned.iter().find(|o| o.buffer == buffer).ok_or_else(|| {
                Fault::new("request", format!("buffer {buffer} is no constant or workspace of this runner"))
            })?;
            let bytes = self.plan.buffers.get(buffer).map_or(0, |b| b.bytes);
            let copy = Physical::create(bench.context.device, bytes, bench.step, true)?;
            let copy = Allocation::of(bench.context.device, copy, true)?;
            // SAFETY: both have at least `bytes`.
            let result = unsafe {
                sys::cuMemcpyDtoDAsync_v2(
                    copy.address(),
                    owned.allocation.address(),
                    size(bytes)?,
                    bench.context.stream,
                )
            };
            check(result, "copying a buffer")?;
            bench.context.wait("copying a buffer")?;
            list.push(SharedBuffer { buffer, fd: fds.len(), bytes });
            // The descriptor keeps the memory when `copy` goes.
            fds.push(copy.memory.export()?);
        }
        let mut reply = Reply::of(&json!({ "buffers": list }))?;
        reply.fds = fds;
        Ok(reply)
    }
}

fn read_all(fd: OwnedFd) -> Result<Vec<u8>, Fault> {
    let file = File::from(fd);
    let failed = |e: std::io::Error| Fault::new("image", format!("an image can't be read: {e}"));
    let length = size(file.metadata().map_err(failed)?.len())?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    Ok(bytes)
}

fn import_parameters(
    bench: &Bench,
    plan: &Plan,
    given: &Buffers,
    fds: &mut Fds,
    parameters: &mut Vec<Allocation>,
    addresses: &mut [u64],
) -> Result<(), Fault> {
    for (name, shared) in &given.parameters {
        let fd = fds.take(shared.fd)?;
        let used = |kind: &BufferKind| matches!(kind, BufferKind::Parameter(n) if n == name);
        let wanted = plan.buffers.iter().filter(|b| used(&b.kind)).map(|b| b.bytes).max();
        let Some(wanted) = wanted else { continue };
        if shared.bytes < wanted {
            let why = format!("parameter `{name}` has {} bytes, the plan touches {wanted}", shared.bytes);
            return Err(Fault::new("memory", why));
        }
        let memory = Physical::import(&fd, shared.bytes, bench.step)?;
        let allocation = Allocation::of(bench.context.device, memory, false)?;
        for (address, buffer) in addresses.iter_mut().zip(&plan.buffers) {
            if used(&buffer.kind) {
                *address = allocation.address();
            }
        }
        parameters.push(allocation);
    }
    Ok(())
}

type Imported = (Vec<Option<Range>>, Vec<Vec<Option<Physical>>>);

fn import_inputs(
    bench: &Bench,
    plan: &Plan,
    inputs: &[Vec<Option<Shared>>],
    fds: &mut Fds,
    addresses: &mut [u64],
) -> Result<Imported, Fault> {
    let mut wanted: BTreeMap<usize, u64> = BTreeMap::new();
    for buffer in &plan.buffers {
        if let BufferKind::Input(n) = buffer.kind {
            let most = wanted.entry(n).or_default();
            *most = buffer.bytes.max(*most);
        }
    }
    let mut slots = Vec::with_capacity(inputs.len());
    for list in inputs {
        let mut slot = Vec::with_capacity(list.len());
        for (n, input) in list.iter().enumerate() {
            slot.push(match (input, wanted.get(&n)) {
                (Some(shared), Some(&wanted)) => {
                    if shared.bytes < wanted {
                        let why = format!("input {n} has {} bytes, the plan touches {wanted}", shared.bytes);
                        return Err(Fault::new("memory", why));
                    }
                    Some(Physical::import(&fds.take(shared.fd)?, shared.bytes, bench.step)?)
                }
                // Inputs that no node reads need no mapping.
                _ => None,
            });
        }
        slots.push(slot);
    }
    let count = slots.iter().map(Vec::len).max().unwrap_or(0);
    let mut ranges = Vec::with_capacity(count);
    for n in 0..count {
        let sizes = slots.iter().filter_map(|slot| slot.get(n)?.as_ref().map(|memory| memory.size));
        let Some(most) = sizes.max() else {
            ranges.push(None);
            continue;
        };
        if slots.iter().any(|slot| slot.get(n).is_none_or(Option::is_none)) {
            return Err(Fault::new("request", format!("input {n} is missing in a slot")));
        }
        let range = Range::reserve(bench.context.device, most)?;
        for (address, buffer) in addresses.iter_mut().zip(&plan.buffers) {
            if buffer.kind == BufferKind::Input(n) {
                *address = range.address;
            }
        }
        ranges.push(Some(range));
    }
    Ok((ranges, slots))
}

/// Workspaces and constants: memory of this process, exported where it holds an output.
fn allocate(bench: &Bench, plan: &Plan, addresses: &mut [u64]) -> Result<Vec<Owned>, Fault> {
    let outputs = output_buffers(plan);
    let mut owned = Vec::new();
    for (buffer, (planned, address)) in plan.buffers.iter().zip(addresses).enumerate() {
        let noise = match planned.kind {
            BufferKind::Workspace => Some(noise_kind(plan, buffer)),
            BufferKind::Constant(_) => None,
            _ => continue,
        };
        let exported = outputs.contains(&buffer);
        let memory = Physical::create(bench.context.device, planned.bytes, bench.step, exported)?;
        let allocation = Allocation::of(bench.context.device, memory, true)?;
        *address = allocation.address();
        owned.push(Owned { buffer, allocation, noise, exported });
    }
    Ok(owned)
}

/// What data in a workspace would look like: the type of an output in it, or of a library call's tensor, else
/// that of the plan's first output.
fn noise_kind(plan: &Plan, buffer: usize) -> Kind {
    let calls = plan.nodes.iter().flat_map(|node| match &node.op {
        Op::Library(Library::Matmul { a, b, out, .. }) => vec![a, b, out],
        Op::Library(Library::Conv { x, weight, out, .. }) => vec![x, weight, out],
        _ => Vec::new(),
    });
    let inside = plan.outputs.iter().chain(calls).find(|tensor| tensor.buffer == buffer);
    inside.or(plan.outputs.first()).map_or(Kind(0), |tensor| Kind::of(tensor.dtype))
}

fn check_pointers(plan: &Plan, launch: &crate::plan::Launch) -> Result<(), Fault> {
    for (n, arg) in launch.args.iter().enumerate() {
        if let crate::plan::Arg::Pointer { buffer, offset } = *arg
            && plan.buffers.get(buffer).is_none_or(|b| offset > b.bytes)
        {
            return Err(Fault::new("arguments", format!("argument {n} points outside of buffer {buffer}")));
        }
    }
    Ok(())
}

fn tensor_address(plan: &Plan, addresses: &[u64], tensor: &TensorRef) -> Result<u64, Fault> {
    let bad = || Fault::new("plan", format!("a tensor of a library call leaves buffer {}", tensor.buffer));
    let (Some(buffer), Some(&address)) = (plan.buffers.get(tensor.buffer), addresses.get(tensor.buffer)) else {
        return Err(bad());
    };
    if tensor.shape.len() != tensor.strides.len() {
        return Err(bad());
    }
    let mut last = 0u64;
    for (&size, &stride) in tensor.shape.iter().zip(&tensor.strides) {
        let reach = size.saturating_sub(1).checked_mul(stride).ok_or_else(bad)?;
        last = last.checked_add(reach).ok_or_else(bad)?;
    }
    let empty = tensor.shape.contains(&0);
    let bytes = if empty { Some(0) } else { (last.checked_add(1)).and_then(|n| n.checked_mul(tensor.dtype.size())) };
    let end = bytes.and_then(|bytes| bytes.checked_add(tensor.offset)).ok_or_else(bad)?;
    if end > buffer.bytes || !tensor.offset.is_multiple_of(tensor.dtype.size()) {
        return Err(bad());
    }
    Ok(address + tensor.offset)
}

fn fill_is_sound(plan: &Plan, fill: &Fill) -> bool {
    let width = fill.pattern.len() as u64;
    let inside = |bytes: u64| fill.offset.checked_add(fill.bytes).is_some_and(|end| end <= bytes);
    matches!(width, 1 | 2 | 4 | 8)
        && fill.bytes.is_multiple_of(width)
        && fill.offset.is_multiple_of(width.min(4))
        && plan.buffers.get(fill.buffer).is_some_and(|buffer| inside(buffer.bytes))
}

fn issue_fill(fill: &Fill, address: u64, stream: sys::CUstream) -> Result<(), Fault> {
    if fill.bytes == 0 {
        return Ok(());
    }
    let bytes = size(fill.bytes)?;
    let doing = "filling a buffer";
    // SAFETY (all calls below): `fill_is_sound` holds, so that `bytes` from `address` lie in one mapped buffer
    // and `address` is aligned to the element.
    match *fill.pattern.as_slice() {
        [first, ref rest @ ..] if rest.iter().all(|&b| b == first) => {
            // SAFETY: as above.
            check(unsafe { sys::cuMemsetD8Async(address, first, bytes, stream) }, doing)
        }
        [a, b] => {
            // SAFETY: as above.
            check(unsafe { sys::cuMemsetD16Async(address, u16::from_le_bytes([a, b]), bytes / 2, stream) }, doing)
        }
        [a, b, c, d] => {
            let word = u32::from_le_bytes([a, b, c, d]);
            // SAFETY: as above.
            check(unsafe { sys::cuMemsetD32Async(address, word, bytes / 4, stream) }, doing)
        }
        [a, b, c, d, e, f, g, h] => {
            let (low, high) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
            if low == high {
                // SAFETY: as above.
                return check(unsafe { sys::cuMemsetD32Async(address, low, bytes / 4, stream) }, doing);
            }
            // There is no fill of eight bytes: two of four, one word wide, a row every eight bytes.
            // SAFETY: as above.
            check(unsafe { sys::cuMemsetD2D32Async(address, 8, low, 1, bytes / 8, stream) }, doing)?;
            // SAFETY: as above; the last word ends where the fill ends.
            check(unsafe { sys::cuMemsetD2D32Async(address + 4, 8, high, 1, bytes / 8, stream) }, doing)
        }
        _ => Err(Fault::new("plan", "a fill has a pattern of a wrong length")),
    }
}
