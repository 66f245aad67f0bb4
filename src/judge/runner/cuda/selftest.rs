//! `kernelfleet selftest-cuda`: the CUDA runner's promises, tried on the card that is here.
//!
//! Plays the supervisor and the reference host for a real runner process: shares buffers, loads plans with
//! the kernels of `selftest.cu`, compares what comes out with sums done on the CPU. Needs no compiler; with
//! `cublaslt=PATH` and `cudnn=PATH` it tries the libraries too (`nvrtc=PATH` and `nvrtc-builtins=PATH` are for
//! cuDNN's kernels that are compiled when they are needed). It judges nobody.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::{Context, check, size};
use super::memory::{Allocation, Physical, granularity};
use crate::judge::runner::client::{Error, Exported, LoadRequest, Loaded, Runner};
use crate::judge::runner::{Arithmetic, Fault, Item};
use crate::plan::{
    Arg, Buffer, BufferKind, Device, Dtype, Fill, Launch, Library, Module, Node, Op, Plan, Structure, TensorRef,
    VERSION,
};

/// Name of the hidden subcommand.
pub const COMMAND: &str = "selftest-cuda";

const SOON: Duration = Duration::from_secs(60);

type Outcome = Result<(), String>;
type Check = fn(&Bed) -> Outcome;

/// Runs every check and prints a line each. `libraries`: their paths by the names that a runner knows.
#[must_use]
pub fn main(libraries: BTreeMap<String, String>) -> ExitCode {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("this program's own path is unknown: {error}");
            return ExitCode::FAILURE;
        }
    };
    let bed = match Bed::new(program, libraries) {
        Ok(bed) => bed,
        Err(fault) => {
            eprintln!("{fault}");
            return ExitCode::FAILURE;
        }
    };
    let checks: [(&str, Check); 18] = [
        ("the card is described and copies at its rate", card),
        ("inputs, parameters and constants are read, the output written, slot by slot", slots),
        ("constants can be replaced and snapshots taken", constants),
        ("arguments take the width of the kernel's parameters", arguments),
        ("fills of 1, 2, 4 and 8 bytes write what they say", fills),
        ("a block can use far more than 48 KiB of shared memory", shared_memory),
        ("a cooperative grid is resident, one too large is refused", cooperative),
        ("a launch in clusters runs where the card has them", clusters),
        ("workspaces are full of noise before each sample", noise),
        ("device globals are reset by a reload", reload),
        ("another plan can follow in the same process, and meets nothing of the first", another),
        ("an empty plan takes a few microseconds, and repeats agree", timing),
        ("profile and attribute see each node", profile),
        ("an illegal access is reported, attributed and final", illegal_access),
        ("huge local memory and wrong arguments are refused", refusals),
        ("matrix products agree with sums done on the CPU", matmuls),
        ("convolutions agree with sums done on the CPU", convolutions),
        ("a library without a path is refused", no_library),
    ];
    let mut failed = 0;
    for (name, check) in checks {
        match check(&bed) {
            Ok(()) => println!("ok      {name}"),
            Err(why) if why.starts_with("skipped") => println!("skipped {name}: {why}"),
            Err(why) => {
                failed += 1;
                println!("FAILED  {name}: {why}");
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn text<E: std::fmt::Display>(error: E) -> String {
    error.to_string()
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(why()) }
}

fn close(got: &[f32], want: &[f32], tolerance: f32) -> Outcome {
    ensure(got.len() == want.len(), || format!("{} values, {} expected", got.len(), want.len()))?;
    let near = |g: f32, w: f32| (g - w).abs() <= tolerance * w.abs().max(1.0);
    match got.iter().zip(want).position(|(&g, &w)| !near(g, w)) {
        None => Ok(()),
        Some(n) => Err(format!("value {n} is {:?}, {:?} expected", got.get(n), want.get(n))),
    }
}

/// This process's own side of shared buffers.
struct Bed {
    program: PathBuf,
    libraries: BTreeMap<String, String>,
    context: Context,
    step: u64,
}

/// A runner with a plan, and the buffers that this process shares with it.
struct Stage {
    runner: Runner,
    loaded: Loaded,
    _shared: Vec<Allocation>,
}

/// What a plan runs on.
#[derive(Default)]
struct Data<'a> {
    /// `[slot][input]`.
    inputs: Vec<Vec<Vec<f32>>>,
    parameters: Vec<(&'a str, Vec<f32>)>,
    constants: Vec<Vec<f32>>,
    arithmetic: Arithmetic,
}

impl Bed {
    fn new(program: PathBuf, libraries: BTreeMap<String, String>) -> Result<Self, Fault> {
        let context = Context::new()?;
        let step = granularity(context.device)?;
        Ok(Self { program, libraries, context, step })
    }

    fn start(&self) -> Result<Runner, Error> {
        let mut runner = Runner::spawn(&self.program, Device::Cuda, |command| {
            command.stderr(Stdio::inherit());
        })?;
        runner.hello(SOON)?;
        Ok(runner)
    }

    fn share(&self, values: &[f32]) -> Result<Allocation, Fault> {
        let memory = Physical::create(self.context.device, 4 * values.len() as u64, self.step, true)?;
        let allocation = Allocation::of(self.context.device, memory, true)?;
        // SAFETY: the source holds the bytes named, the allocation at least as many.
        let result = unsafe { sys::cuMemcpyHtoD_v2(allocation.address(), values.as_ptr().cast(), size_of_val(values)) };
        check(result, "writing a shared buffer")?;
        self.settle()?;
        Ok(allocation)
    }

    fn settle(&self) -> Result<(), Fault> {
        // SAFETY: takes nothing.
        check(unsafe { sys::cuCtxSynchronize() }, "waiting for copies")
    }

    fn read(&self, exported: &Exported, count: usize) -> Result<Vec<f32>, String> {
        let inner = || {
            let memory = Physical::import(&exported.fd, exported.bytes, self.step)?;
            let allocation = Allocation::of(self.context.device, memory, true)?;
            let mut values = vec![0f32; count];
            // SAFETY: the target holds the bytes named, the allocation more (2 MiB at least).
            let result = unsafe {
                sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), allocation.address(), size(4 * count as u64)?)
            };
            check(result, "reading a shared buffer")?;
            Ok::<_, Fault>(values)
        };
        inner().map_err(text)
    }

    fn stage(&self, plan: &Plan, data: &Data<'_>) -> Result<Stage, String> {
        self.try_stage(plan, data).map_err(text)
    }

    fn try_stage(&self, plan: &Plan, data: &Data<'_>) -> Result<Stage, Error> {
        self.stage_in(self.start()?, plan, data)
    }

    fn stage_in(&self, mut runner: Runner, plan: &Plan, data: &Data<'_>) -> Result<Stage, Error> {
        let broken = |e: std::io::Error| Error::Io { doing: "making a test's buffers".into(), source: e };
        let mut shared = Vec::new();
        let mut handed = Vec::new();
        let mut add = |values: &Vec<f32>| -> Result<usize, Fault> {
            let allocation = self.share(values)?;
            handed.push((allocation.memory.export()?, 4 * values.len() as u64));
            shared.push(allocation);
            Ok(handed.len() - 1)
        };
        let inputs: Vec<Vec<usize>> = data
            .inputs
            .iter()
            .map(|slot| slot.iter().map(&mut add).collect::<Result<_, _>>())
            .collect::<Result<_, Fault>>()?;
        let parameters: Vec<(String, usize)> = data
            .parameters
            .iter()
            .map(|(name, values)| Ok(((*name).to_owned(), add(values)?)))
            .collect::<Result<_, Fault>>()?;
        let (constants, items) = constant_file(&data.constants).map_err(broken)?;
        let mut image = tempfile::tempfile().map_err(broken)?;
        image.write_all(include_bytes!("selftest.ptx")).map_err(broken)?;
        let at = |&n: &usize| handed.get(n).map(|(fd, bytes)| (fd.as_fd(), *bytes));
        let request = LoadRequest {
            plan,
            images: plan.modules.iter().map(|_| image.as_fd()).collect(),
            inputs: inputs.iter().map(|slot| slot.iter().map(at).collect()).collect(),
            parameters: parameters.iter().filter_map(|(name, n)| Some((name.clone(), at(n)?))).collect(),
            constants: (!items.is_empty()).then(|| (constants.as_fd(), items.clone())),
            libraries: self.libraries.clone(),
            precision: data.arithmetic,
            seed: 1,
            helper: None,
        };
        let loaded = runner.load(&request, SOON)?;
        Ok(Stage { runner, loaded, _shared: shared })
    }
}

fn constant_file(constants: &[Vec<f32>]) -> std::io::Result<(File, Vec<Item>)> {
    let mut file = tempfile::tempfile()?;
    let mut items = Vec::new();
    let mut offset = 0;
    for values in constants {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        file.write_all(&bytes)?;
        items.push(Item { offset, bytes: bytes.len() as u64 });
        offset += bytes.len() as u64;
    }
    Ok((file, items))
}

impl Stage {
    fn run(&mut self, slot: usize) -> Result<f64, String> {
        Ok(self.runner.run(slot, slot as u64 + 7, SOON).map_err(text)?.0.time_us)
    }

    fn output(&self, bed: &Bed, count: usize) -> Result<Vec<f32>, String> {
        bed.read(self.loaded.outputs.first().ok_or("no output")?, count)
    }
}

fn launch(kernel: &str, grid: u32, block: u32, args: Vec<Arg>) -> Launch {
    Launch {
        module: 0,
        kernel: kernel.into(),
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        shared: 0,
        cluster: None,
        cooperative: false,
        args,
    }
}

fn pointer(buffer: usize) -> Arg {
    Arg::Pointer { buffer, offset: 0 }
}

/// A plan whose last buffer is the output.
fn plan(buffers: Vec<(BufferKind, usize)>, ops: Vec<Op>) -> Plan {
    let last = buffers.len().saturating_sub(1);
    let count = buffers.last().map_or(0, |(_, floats)| *floats) as u64;
    Plan {
        version: VERSION,
        device: Device::Cuda,
        buffers: buffers.into_iter().map(|(kind, floats)| Buffer { kind, bytes: 4 * floats as u64 }).collect(),
        modules: vec![Module { path: "selftest.cu".into(), defines: vec![], flags: vec![] }],
        nodes: ops.into_iter().map(|op| Node { op, line: None }).collect(),
        outputs: vec![TensorRef {
            buffer: last,
            offset: 0,
            dtype: Dtype::Float32,
            shape: vec![count],
            strides: vec![1],
        }],
        structure: Structure::Tensor,
    }
}

#[allow(clippy::cast_precision_loss)]
fn ramp(count: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|n| ((n * 7919 % 1009) as f32 / 504.0 - 1.0) * scale).collect()
}

fn axpy(n: usize, weight: BufferKind) -> Plan {
    let count = i64::try_from(n).unwrap_or(0);
    let blocks = u32::try_from(n.div_ceil(256)).unwrap_or(1);
    let args = vec![pointer(0), pointer(1), pointer(2), Arg::Int(count), Arg::Float(0.5)];
    let buffers = vec![(BufferKind::Input(0), n), (weight, n), (BufferKind::Workspace, n)];
    plan(buffers, vec![Op::Launch(launch("st_axpy", blocks, 256, args))])
}

fn card(bed: &Bed) -> Outcome {
    let mut runner = bed.start().map_err(text)?;
    let info = runner.device(SOON).map_err(text)?;
    println!("        {info:?}");
    ensure(info.multi_processor_count > 0 && info.uuid.len() == 40, || "the description is incomplete".into())?;
    let rate = runner.copy_rate(SOON).map_err(text)?;
    println!("        copies {rate:.0} GB/s, read and written");
    ensure(rate > 50.0, || "that is too slow to be true".into())
}

fn slots(bed: &Bed) -> Outcome {
    let n = 1 << 20;
    let weight = ramp(n, 3.0);
    let inputs: Vec<Vec<Vec<f32>>> = (1..=3u8).map(|s| vec![ramp(n, f32::from(s))]).collect();
    let data = Data { inputs: inputs.clone(), parameters: vec![("w", weight.clone())], ..Data::default() };
    let mut stage = bed.stage(&axpy(n, BufferKind::Parameter("w".into())), &data)?;
    println!("        {:?}", stage.loaded.launches);
    for slot in [0, 2, 1, 1, 0] {
        let time = stage.run(slot)?;
        ensure(time > 0.5, || format!("{time} us for 12 MB"))?;
        let want: Vec<f32> = inputs[slot][0].iter().zip(&weight).map(|(x, w)| 0.5 * x + w).collect();
        close(&stage.output(bed, n)?, &want, 1e-6)?;
    }
    Ok(())
}

fn constants(bed: &Bed) -> Outcome {
    let n = 1000;
    let (x, c) = (ramp(n, 1.0), ramp(n, 9.0));
    let data = Data { inputs: vec![vec![x.clone()]], constants: vec![c.clone()], ..Data::default() };
    let mut stage = bed.stage(&axpy(n, BufferKind::Constant(0)), &data)?;
    stage.run(0)?;
    let want = |c: &[f32]| x.iter().zip(c).map(|(x, c)| 0.5 * x + c).collect::<Vec<_>>();
    close(&stage.output(bed, n)?, &want(&c), 1e-6)?;
    let other = ramp(n, -4.0);
    let (file, items) = constant_file(std::slice::from_ref(&other)).map_err(text)?;
    stage.runner.constants(file.as_fd(), &items, SOON).map_err(text)?;
    stage.run(0)?;
    close(&stage.output(bed, n)?, &want(&other), 1e-6)?;
    let copies = stage.runner.snapshot(&[], SOON).map_err(text)?;
    ensure(copies.len() == 1 && copies[0].buffer == 1, || "one constant was expected".into())?;
    close(&bed.read(&copies[0], n)?, &other, 0.0)
}

fn arguments(bed: &Bed) -> Outcome {
    let args = vec![
        pointer(0),
        Arg::Int(-5),
        Arg::F16(1.0),
        Arg::Int(-70_000),
        Arg::Int(3 << 40),
        Arg::Float(0.25),
        Arg::Float(1e-3),
        Arg::U8(200),
        Arg::Null,
    ];
    let plan = plan(vec![(BufferKind::Workspace, 8)], vec![Op::Launch(launch("st_args", 1, 1, args))]);
    let mut stage = bed.stage(&plan, &Data { inputs: vec![vec![]], ..Data::default() })?;
    stage.run(0)?;
    close(&stage.output(bed, 8)?, &[-5.0, 15360.0, -70_000.0, 3.0, 0.25, 1e-3, 200.0, 1.0], 1e-6)
}

fn fills(bed: &Bed) -> Outcome {
    let fill = |offset, bytes, pattern: &[u8]| Op::Fill(Fill { buffer: 0, offset, bytes, pattern: pattern.to_vec() });
    let two = [1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat();
    let half = 3.0f32.to_le_bytes();
    let ops = vec![
        fill(0, 4096, &[0]),
        fill(64, 64, &two),
        fill(128, 64, &7.0f32.to_le_bytes()),
        fill(192, 64, &half[..2]),
        fill(194, 2, &half[2..]),
        fill(256, 64, &[5.0f32.to_le_bytes(), 5.0f32.to_le_bytes()].concat()),
    ];
    let mut stage =
        bed.stage(&plan(vec![(BufferKind::Workspace, 1024)], ops), &Data { inputs: vec![vec![]], ..Data::default() })?;
    stage.run(0)?;
    let mut want = vec![0f32; 1024];
    for pair in want[16..32].chunks_mut(2) {
        pair.copy_from_slice(&[1.0, 2.0]);
    }
    want[32..48].fill(7.0);
    want[48] = 3.0;
    want[64..80].fill(5.0);
    close(&stage.output(bed, 1024)?, &want, 0.0)
}

fn shared_memory(bed: &Bed) -> Outcome {
    let n = usize::try_from(bed.context.info.shared_memory_per_block_optin).unwrap_or(0) / 4;
    let mut reverse = launch("st_reverse", 1, 1024, vec![pointer(0), pointer(1), Arg::Int(n as i64)]);
    reverse.shared = u32::try_from(4 * n).unwrap_or(0);
    let x = ramp(n, 1.0);
    let buffers = vec![(BufferKind::Input(0), n), (BufferKind::Workspace, n)];
    let mut stage = bed
        .stage(&plan(buffers, vec![Op::Launch(reverse)]), &Data { inputs: vec![vec![x.clone()]], ..Data::default() })?;
    stage.run(0)?;
    let want: Vec<f32> = x.into_iter().rev().collect();
    close(&stage.output(bed, n)?, &want, 0.0)
}

fn cooperative(bed: &Bed) -> Outcome {
    let blocks = u32::try_from(bed.context.info.multi_processor_count).unwrap_or(1);
    let make = |grid: u32| {
        let zero = Op::Fill(Fill { buffer: 0, offset: 0, bytes: 4, pattern: vec![0] });
        let mut meet = launch("st_meet", grid, 32, vec![pointer(0), pointer(1)]);
        meet.cooperative = true;
        plan(vec![(BufferKind::Workspace, 1), (BufferKind::Workspace, grid as usize)], vec![zero, Op::Launch(meet)])
    };
    let data = Data { inputs: vec![vec![]], ..Data::default() };
    let mut stage = bed.stage(&make(blocks), &data)?;
    stage.run(0)?;
    close(&stage.output(bed, blocks as usize)?, &vec![1.0; blocks as usize], 0.0)?;
    match bed.try_stage(&make(1 << 20), &data) {
        Err(Error::Refused(fault)) if fault.code == "launch_failed" && fault.message.contains("resident") => Ok(()),
        Err(error) => Err(format!("a million blocks: {error}")),
        Ok(_) => Err("a million blocks were accepted".into()),
    }
}

fn clusters(bed: &Bed) -> Outcome {
    let n = 4096;
    let mut plan = axpy(n, BufferKind::Parameter("w".into()));
    if let Some(Op::Launch(launch)) = plan.nodes.first_mut().map(|node| &mut node.op) {
        launch.cluster = Some([4, 1, 1]);
    }
    let (x, w) = (ramp(n, 1.0), ramp(n, 2.0));
    let data = Data { inputs: vec![vec![x.clone()]], parameters: vec![("w", w.clone())], ..Data::default() };
    if bed.context.info.major < 9 {
        return match bed.try_stage(&plan, &data) {
            Err(error) if error.code() == "launch_failed" => Ok(()),
            _ => Err("clusters should be refused on this card".into()),
        };
    }
    let mut stage = bed.stage(&plan, &data)?;
    stage.run(0)?;
    let want: Vec<f32> = x.iter().zip(&w).map(|(x, w)| 0.5 * x + w).collect();
    close(&stage.output(bed, n)?, &want, 1e-6)
}

fn noise(bed: &Bed) -> Outcome {
    let n = 100_000;
    // A kernel that writes one value; all others are what was there before it.
    let count = Op::Launch(launch("st_count", 1, 1, vec![pointer(0)]));
    let plan = plan(vec![(BufferKind::Workspace, n)], vec![count]);
    let mut stage = bed.stage(&plan, &Data { inputs: vec![vec![]], ..Data::default() })?;
    stage.run(0)?;
    let first = stage.output(bed, n)?;
    ensure(first.iter().skip(1).all(|v| v.is_finite() && v.abs() < 2.0), || "noise leaves (-2, 2)".into())?;
    #[allow(clippy::cast_precision_loss)]
    let mean = first.iter().sum::<f32>() / n as f32;
    ensure(mean.abs() < 0.05, || format!("the mean is {mean}"))?;
    stage.runner.run(0, 99, SOON).map_err(text)?;
    let second = stage.output(bed, n)?;
    let same = first.iter().zip(&second).filter(|(a, b)| a == b).count();
    ensure(same < n / 100, || format!("{same} of {n} values are the same under another seed"))
}

fn reload(bed: &Bed) -> Outcome {
    let count = Op::Launch(launch("st_count", 1, 1, vec![pointer(0)]));
    let mut stage = bed.stage(
        &plan(vec![(BufferKind::Workspace, 1)], vec![count]),
        &Data { inputs: vec![vec![]], ..Data::default() },
    )?;
    for want in [1.0, 2.0] {
        stage.run(0)?;
        close(&stage.output(bed, 1)?, &[want], 0.0)?;
    }
    stage.runner.reload(SOON).map_err(text)?;
    stage.run(0)?;
    close(&stage.output(bed, 1)?, &[1.0], 0.0)
}

/// What one plan leaves (a global of its module, a larger workspace, other inputs) is not there for the next one, again and again.
fn another(bed: &Bed) -> Outcome {
    let count = Op::Launch(launch("st_count", 1, 1, vec![pointer(0)]));
    let counting = plan(vec![(BufferKind::Workspace, 1)], vec![count]);
    let mut stage = bed.stage(&counting, &Data { inputs: vec![vec![]], ..Data::default() })?;
    let free = |stage: &mut Stage| stage.runner.device(SOON).map(|info| info.free_memory).map_err(text);
    let mut at_first = None;
    for round in 0..8 {
        stage.run(0)?;
        close(&stage.output(bed, 1)?, &[1.0], 0.0)?;
        let Stage { mut runner, loaded, _shared: shared } = stage;
        runner.unload(SOON).map_err(text)?;
        match runner.run(0, 1, SOON) {
            Err(Error::Refused(fault)) if fault.code == "request" => {}
            other => return Err(format!("a run without a plan answers {other:?}")),
        }
        drop((loaded, shared));
        let n = 1 << (16 + round);
        let (x, w) = (ramp(n, 1.0), ramp(n, 0.5));
        let want: Vec<f32> = x.iter().zip(&w).map(|(x, w)| 0.5 * x + w).collect();
        let data = Data { inputs: vec![vec![x]], parameters: vec![("w", w)], ..Data::default() };
        let mut second = bed.stage_in(runner, &axpy(n, BufferKind::Parameter("w".into())), &data).map_err(text)?;
        second.run(0)?;
        close(&second.output(bed, n)?, &want, 1e-6)?;
        let Stage { mut runner, loaded, _shared: shared } = second;
        runner.unload(SOON).map_err(text)?;
        drop((loaded, shared));
        let again = Data { inputs: vec![vec![]], ..Data::default() };
        stage = bed.stage_in(runner, &counting, &again).map_err(text)?;
        let left = free(&mut stage)?;
        let first = *at_first.get_or_insert(left);
        // A buffer that were kept would be 2 MiB at least, each round.
        ensure(first.saturating_sub(left) < 8 << 20, || format!("{left} bytes are free after {first}"))?;
    }
    Ok(())
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list.get(list.len() / 2).copied().unwrap_or(f64::NAN)
}

fn timing(bed: &Bed) -> Outcome {
    let n = 32 << 20;
    let data = Data { inputs: vec![vec![vec![1.0; n]]], parameters: vec![("w", vec![2.0; n])], ..Data::default() };
    let mut stage = bed.stage(&axpy(n, BufferKind::Parameter("w".into())), &data)?;
    let (null, _) = stage.runner.null(50, SOON).map_err(text)?;
    let mut times = Vec::new();
    for _ in 0..60 {
        times.push(stage.run(0)?);
    }
    let (empty, wall) = (median(null.time_us), median(null.wall_us));
    let late = median(times.split_off(30));
    let early = median(times);
    println!(
        "        empty {empty:.2} us ({wall:.1} us of host clock with the flush), 384 MB {early:.2} and {late:.2} us"
    );
    ensure(empty < 50.0, || "an empty plan takes too long".into())?;
    ensure((early / late - 1.0).abs() < 0.1, || "halves differ by more than 10 %".into())
}

fn profile(bed: &Bed) -> Outcome {
    let n = 1 << 20;
    let mut plan = axpy(n, BufferKind::Parameter("w".into()));
    plan.nodes.insert(0, Node { op: Op::Fill(Fill { buffer: 2, offset: 0, bytes: 4, pattern: vec![0] }), line: None });
    let data = Data { inputs: vec![vec![ramp(n, 1.0)]], parameters: vec![("w", ramp(n, 1.0))], ..Data::default() };
    let mut stage = bed.stage(&plan, &data)?;
    let times = stage.runner.profile(0, 5, SOON).map_err(text)?;
    println!("        {times:?}");
    ensure(times.len() == 2 && times.iter().all(|t| t.time_us > 0.1), || "a node took no time".into())?;
    stage.runner.attribute(0, 3, SOON).map_err(text)
}

fn illegal_access(bed: &Bed) -> Outcome {
    let zero = Op::Fill(Fill { buffer: 0, offset: 0, bytes: 4, pattern: vec![0] });
    let plan = plan(vec![(BufferKind::Workspace, 1)], vec![zero, Op::Launch(launch("st_bad", 1, 1, vec![pointer(0)]))]);
    let data = Data { inputs: vec![vec![]], ..Data::default() };
    let mut stage = bed.stage(&plan, &data)?;
    match stage.runner.run(0, 1, SOON) {
        Err(Error::Refused(fault)) if fault.code == "illegal_access" => {}
        other => return Err(format!("run answers {other:?}")),
    }
    match stage.runner.run(0, 2, SOON) {
        Err(Error::Refused(fault)) if fault.code == "lost" => {}
        other => return Err(format!("the next run answers {other:?}")),
    }
    drop(stage);
    let mut stage = bed.stage(&plan, &data)?;
    match stage.runner.attribute(0, 1, SOON) {
        Err(Error::Refused(fault)) if fault.node == Some(1) && fault.kernel.as_deref() == Some("st_bad") => Ok(()),
        other => Err(format!("attribute answers {other:?}")),
    }
}

fn refusals(bed: &Bed) -> Outcome {
    let data = Data { inputs: vec![vec![]], ..Data::default() };
    for (kernel, args, code) in [
        ("st_local", vec![pointer(0), Arg::Int(8)], "launch_failed"),
        ("st_count", vec![], "arguments"),
        ("st_count", vec![Arg::F32(1.0)], "arguments"),
        ("st_nowhere", vec![], "symbol"),
    ] {
        // The gate wants a writer of every output.
        let zero = Op::Fill(Fill { buffer: 0, offset: 0, bytes: 4, pattern: vec![0] });
        let ops = vec![zero, Op::Launch(launch(kernel, 1, 1, args))];
        match bed.try_stage(&plan(vec![(BufferKind::Workspace, 1)], ops), &data) {
            Err(error) if error.code() == code => {}
            Err(error) => return Err(format!("{kernel}: {error}")),
            Ok(_) => return Err(format!("{kernel} was accepted")),
        }
    }
    Ok(())
}

fn tensor(buffer: usize, shape: &[u64], strides: &[u64]) -> TensorRef {
    TensorRef { buffer, offset: 0, dtype: Dtype::Float32, shape: shape.into(), strides: strides.into() }
}

fn at(data: &[f32], tensor: &TensorRef, index: &[u64]) -> f32 {
    let place: u64 = index.iter().zip(&tensor.strides).map(|(i, s)| i * s).sum();
    usize::try_from(place).ok().and_then(|p| data.get(p)).copied().unwrap_or(f32::NAN)
}

fn has(bed: &Bed, name: &str) -> Outcome {
    ensure(bed.libraries.contains_key(name), || format!("skipped, no {name}=PATH was given"))
}

fn matmuls(bed: &Bed) -> Outcome {
    has(bed, "cublaslt")?;
    let (m, k, n) = (48u64, 80u64, 96u64);
    let (a_data, b_data, bias_data) = (ramp(3 * 48 * 80, 1.0), ramp(3 * 80 * 96, 0.5), ramp(96, 2.0));
    let cases = [
        (tensor(0, &[m, k], &[k, 1]), tensor(1, &[k, n], &[n, 1]), tensor(3, &[m, n], &[n, 1]), false),
        (tensor(0, &[m, k], &[k, 1]), tensor(1, &[k, n], &[1, k]), tensor(3, &[m, n], &[n, 1]), true),
        (tensor(0, &[m, k], &[1, m]), tensor(1, &[k, n], &[n, 1]), tensor(3, &[m, n], &[n, 1]), true),
        (tensor(0, &[m, k], &[k, 1]), tensor(1, &[k, n], &[n, 1]), tensor(3, &[m, n], &[1, m]), false),
        (
            tensor(0, &[3, m, k], &[m * k, k, 1]),
            tensor(1, &[3, k, n], &[k * n, 1, k]),
            tensor(3, &[3, m, n], &[m * n, n, 1]),
            true,
        ),
    ];
    for (number, (a, b, out, with_bias)) in cases.into_iter().enumerate() {
        let bias = with_bias.then(|| tensor(2, &[n], &[1]));
        let batch = if out.shape.len() == 3 { 3 } else { 1 };
        let mut want = vec![0f32; usize::try_from(batch * m * n).unwrap_or(0)];
        for z in 0..batch {
            for i in 0..m {
                for j in 0..n {
                    let front: &[u64] = if out.shape.len() == 3 { &[z] } else { &[] };
                    let index = |r: u64, c: u64| [front, &[r, c]].concat();
                    let sum: f64 = (0..k)
                        .map(|x| f64::from(at(&a_data, &a, &index(i, x))) * f64::from(at(&b_data, &b, &index(x, j))))
                        .sum();
                    let bias = if with_bias { f64::from(bias_data[usize::try_from(j).unwrap_or(0)]) } else { 0.0 };
                    let place: u64 = index(i, j).iter().zip(&out.strides).map(|(i, s)| i * s).sum();
                    #[allow(clippy::cast_possible_truncation)]
                    if let Some(value) = usize::try_from(place).ok().and_then(|p| want.get_mut(p)) {
                        *value = (sum + bias) as f32;
                    }
                }
            }
        }
        let buffers = vec![
            (BufferKind::Input(0), a_data.len()),
            (BufferKind::Parameter("b".into()), b_data.len()),
            (BufferKind::Parameter("bias".into()), 96),
            (BufferKind::Workspace, want.len()),
        ];
        let call = Op::Library(Library::Matmul { a, b, bias, out });
        let data = Data {
            inputs: vec![vec![a_data.clone()]],
            parameters: vec![("b", b_data.clone()), ("bias", bias_data.clone())],
            ..Data::default()
        };
        let done = (|| {
            let mut stage = bed.stage(&plan(buffers, vec![call]), &data)?;
            stage.run(0)?;
            stage.run(0)?;
            close(&stage.output(bed, want.len())?, &want, 1e-4)
        })();
        done.map_err(|why| format!("case {number}: {why}"))?;
    }
    Ok(())
}

/// One convolution of the test: all sizes, everything contiguous or channels-last.
struct ConvCase {
    x: Vec<u64>,
    weight: Vec<u64>,
    out: Vec<u64>,
    stride: Vec<u32>,
    padding: Vec<u32>,
    dilation: Vec<u32>,
    groups: u32,
    transposed: bool,
    last: bool,
    tf32: bool,
    half: bool,
}

/// Values as halves, two in each float, filled up to as many floats as there were. They must be exact halves
/// of normal size.
fn pack(values: &[f32]) -> Vec<f32> {
    let half = |v: f32| {
        let bits = v.to_bits();
        let exponent = (bits >> 23) & 0xff;
        if exponent == 0 { 0 } else { (bits >> 16) & 0x8000 | (exponent - 112) << 10 | (bits >> 13) & 0x3ff }
    };
    let both = |pair: &[f32]| f32::from_bits(half(pair[0]) | pair.get(1).map_or(0, |&v| half(v)) << 16);
    let mut packed: Vec<f32> = values.chunks(2).map(both).collect();
    packed.resize(values.len(), 0.0);
    packed
}

/// The first `count` halves that lie in `floats`.
fn unpack(floats: &[f32], count: usize) -> Vec<f32> {
    let float = |bits: u32| {
        let (sign, exponent, fraction) = ((bits & 0x8000) << 16, (bits >> 10) & 0x1f, bits & 0x3ff);
        let size = match exponent {
            // 2^-24 a step.
            0 => f32::from_bits(0x3380_0000) * f32::from(u16::try_from(fraction).unwrap_or(0)),
            31 => f32::from_bits(0x7f80_0000 | fraction << 13),
            _ => f32::from_bits((exponent + 112) << 23 | fraction << 13),
        };
        if sign == 0 { size } else { -size }
    };
    let both = |&value: &f32| [float(value.to_bits() & 0xffff), float(value.to_bits() >> 16)];
    floats.iter().flat_map(both).take(count).collect()
}

fn strides(shape: &[u64], last: bool) -> Vec<u64> {
    let n = shape.len();
    let order: Vec<usize> = if last { [0].into_iter().chain(2..n).chain([1]).collect() } else { (0..n).collect() };
    let mut strides = vec![0; n];
    let mut step = 1;
    for &d in order.iter().rev() {
        strides[d] = step;
        step *= shape[d];
    }
    strides
}

/// Every index of a shape.
fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
    shape.iter().fold(vec![vec![]], |list, &size| {
        list.into_iter().flat_map(|front| (0..size).map(move |n| [front.as_slice(), &[n]].concat())).collect()
    })
}

fn expected_conv(case: &ConvCase, x: (&TensorRef, &[f32]), w: (&TensorRef, &[f32]), bias: &[f32]) -> Vec<f32> {
    let out = tensor(0, &case.out, &strides(&case.out, case.last));
    let total = usize::try_from(case.out.iter().product::<u64>()).unwrap_or(0);
    let mut sums = vec![0f64; total];
    let place = |index: &[u64]| -> usize {
        usize::try_from(index.iter().zip(&out.strides).map(|(i, s)| i * s).sum::<u64>()).unwrap_or(0)
    };
    let groups = u64::from(case.groups);
    for index in indices(&case.out) {
        sums[place(&index)] = f64::from(bias[usize::try_from(index[1]).unwrap_or(0)]);
    }
    // Scatter from the side with the smaller grid: for a convolution that is the output, transposed the input.
    let side = if case.transposed { &case.x } else { &case.out };
    for index in indices(side) {
        for tap in indices(&case.weight[2..]) {
            let far: Option<Vec<u64>> = (0..tap.len())
                .map(|d| {
                    let far = index[d + 2] * u64::from(case.stride[d]) + tap[d] * u64::from(case.dilation[d]);
                    let far = far.checked_sub(u64::from(case.padding[d]))?;
                    let limit = if case.transposed { case.out[d + 2] } else { case.x[d + 2] };
                    (far < limit).then_some(far)
                })
                .collect();
            let Some(far) = far else { continue };
            // Channels of the weight: [large side's group member, inner]. weight.shape[1] is per group.
            let per = case.weight[1];
            let owner = index[1];
            let group = owner / (case.weight[0] / groups);
            for inner in 0..per {
                let other = [&[index[0], group * per + inner], far.as_slice()].concat();
                let weight = f64::from(at(w.1, w.0, &[&[owner, inner], tap.as_slice()].concat()));
                if case.transposed {
                    sums[place(&other)] += weight * f64::from(at(x.1, x.0, &index));
                } else {
                    sums[place(&index)] += weight * f64::from(at(x.1, x.0, &other));
                }
            }
        }
    }
    #[allow(clippy::cast_possible_truncation)]
    sums.into_iter().map(|v| v as f32).collect()
}

fn conv_cases() -> Vec<(&'static str, ConvCase)> {
    let base = || ConvCase {
        x: vec![2, 8, 12, 10],
        weight: vec![16, 8, 3, 3],
        out: vec![2, 16, 12, 10],
        stride: vec![1, 1],
        padding: vec![1, 1],
        dilation: vec![1, 1],
        groups: 1,
        transposed: false,
        last: false,
        tf32: false,
        half: false,
    };
    let transposed = || ConvCase {
        weight: vec![8, 16, 3, 3],
        out: vec![2, 16, 24, 20],
        stride: vec![2, 2],
        transposed: true,
        ..base()
    };
    let space = || ConvCase {
        x: vec![1, 4, 6, 7, 8],
        weight: vec![8, 4, 3, 3, 3],
        out: vec![1, 8, 6, 7, 8],
        stride: vec![1; 3],
        padding: vec![1; 3],
        dilation: vec![1; 3],
        ..base()
    };
    vec![
        ("2-D", base()),
        ("2-D, TF32", ConvCase { tf32: true, ..base() }),
        (
            "strided, dilated",
            ConvCase {
                out: vec![2, 16, 5, 4],
                stride: vec![2, 2],
                dilation: vec![2, 2],
                padding: vec![1, 1],
                ..base()
            },
        ),
        ("grouped", ConvCase { weight: vec![16, 2, 3, 3], groups: 4, ..base() }),
        ("depthwise", ConvCase { weight: vec![8, 1, 3, 3], out: vec![2, 8, 12, 10], groups: 8, ..base() }),
        ("channels-last, TF32", ConvCase { last: true, tf32: true, ..base() }),
        (
            "1-D",
            ConvCase {
                x: vec![2, 8, 40],
                weight: vec![16, 8, 5],
                out: vec![2, 16, 36],
                stride: vec![1],
                padding: vec![0],
                dilation: vec![1],
                ..base()
            },
        ),
        ("3-D", space()),
        ("3-D, TF32", ConvCase { tf32: true, ..space() }),
        ("3-D, channels-last, TF32", ConvCase { last: true, tf32: true, ..space() }),
        ("half", ConvCase { half: true, ..base() }),
        ("half, channels-last", ConvCase { half: true, last: true, ..base() }),
        ("transposed, output_padding 1", transposed()),
        ("transposed, channels-last, TF32", ConvCase { last: true, tf32: true, ..transposed() }),
        ("transposed, half", ConvCase { half: true, ..transposed() }),
        ("transposed, grouped, dilated", {
            let (weight, out) = (vec![8, 4, 3, 3], vec![2, 16, 26, 22]);
            ConvCase { weight, out, groups: 4, dilation: vec![2, 2], ..transposed() }
        }),
        (
            "transposed, 3-D, output_padding 1",
            ConvCase {
                x: vec![1, 8, 4, 5, 6],
                out: vec![1, 4, 8, 10, 12],
                stride: vec![2; 3],
                transposed: true,
                ..space()
            },
        ),
        (
            "transposed, grouped, 1-D",
            ConvCase {
                x: vec![2, 8, 12],
                weight: vec![8, 3, 3],
                out: vec![2, 6, 14],
                stride: vec![1],
                padding: vec![0],
                dilation: vec![1],
                groups: 2,
                transposed: true,
                ..base()
            },
        ),
    ]
}

fn conv_plan(case: &ConvCase) -> Plan {
    let count = |shape: &[u64]| usize::try_from(shape.iter().product::<u64>()).unwrap_or(0);
    let channels = case.out[1];
    // What a transposed convolution has beyond the size that its numbers give.
    let beyond = |d: usize| {
        let reach = u64::from(case.dilation[d]) * (case.weight[d + 2] - 1) + 1;
        let full = (case.x[d + 2] - 1) * u64::from(case.stride[d]) + reach;
        let extra = (case.out[d + 2] + 2 * u64::from(case.padding[d])).saturating_sub(full);
        u32::try_from(extra).unwrap_or(0)
    };
    let space = case.stride.len();
    let output_padding = (0..space).map(|d| if case.transposed { beyond(d) } else { 0 }).collect();
    let dtype = if case.half { Dtype::Float16 } else { Dtype::Float32 };
    let typed = |buffer, shape: &[u64]| TensorRef { dtype, ..tensor(buffer, shape, &strides(shape, case.last)) };
    let call = Op::Library(Library::Conv {
        x: typed(0, &case.x),
        weight: typed(1, &case.weight),
        bias: Some(TensorRef { dtype, ..tensor(2, &[channels], &[1]) }),
        out: typed(3, &case.out),
        stride: case.stride.clone(),
        padding: case.padding.clone(),
        dilation: case.dilation.clone(),
        groups: case.groups,
        transposed: case.transposed,
        output_padding,
    });
    let buffers = vec![
        (BufferKind::Input(0), count(&case.x)),
        (BufferKind::Parameter("w".into()), count(&case.weight)),
        (BufferKind::Parameter("b".into()), count(&[channels])),
        (BufferKind::Workspace, count(&case.out)),
    ];
    plan(buffers, vec![call])
}

fn convolution(bed: &Bed, case: &ConvCase) -> Outcome {
    let count = |shape: &[u64]| usize::try_from(shape.iter().product::<u64>()).unwrap_or(0);
    // Halves hold these values exactly.
    let values = |shape: &[u64], scale: f32| -> Vec<f32> {
        let exact = |v: f32| if case.half { (v * 256.0).round() / 256.0 } else { v };
        ramp(count(shape), scale).into_iter().map(exact).collect()
    };
    let (x_data, w_data) = (values(&case.x, 1.0), values(&case.weight, 0.5));
    let bias_data = values(&case.out[1..2], 2.0);
    let x = tensor(0, &case.x, &strides(&case.x, case.last));
    let weight = tensor(1, &case.weight, &strides(&case.weight, case.last));
    let want = expected_conv(case, (&x, &x_data), (&weight, &w_data), &bias_data);
    let stored = |values: Vec<f32>| if case.half { pack(&values) } else { values };
    let data = Data {
        inputs: vec![vec![stored(x_data)]],
        parameters: vec![("w", stored(w_data)), ("b", stored(bias_data))],
        arithmetic: Arithmetic { matmul_tf32: false, conv_tf32: case.tf32 },
        ..Data::default()
    };
    let mut stage = bed.stage(&conv_plan(case), &data)?;
    stage.run(0)?;
    stage.run(0)?;
    let raw = stage.output(bed, want.len())?;
    let got = if case.half { unpack(&raw, want.len()) } else { raw };
    // TF32 and halves keep ten bits of a fraction: of each factor here, of the sum and its bias there.
    close(
        &got,
        &want,
        if case.tf32 {
            2e-2
        } else if case.half {
            5e-3
        } else {
            5e-4
        },
    )
}

fn convolutions(bed: &Bed) -> Outcome {
    has(bed, "cudnn")?;
    let mut failed = Vec::new();
    for (name, case) in conv_cases() {
        match convolution(bed, &case) {
            Ok(()) => println!("        {name}: ok"),
            Err(why) => {
                println!("        {name}: FAILED: {why}");
                failed.push(name);
            }
        }
    }
    ensure(failed.is_empty(), || format!("{} of {} failed: {}", failed.len(), conv_cases().len(), failed.join("; ")))
}

fn no_library(bed: &Bed) -> Outcome {
    let bare = Bed {
        program: bed.program.clone(),
        libraries: BTreeMap::new(),
        context: Context::new().map_err(text)?,
        step: bed.step,
    };
    let square = |buffer| tensor(buffer, &[4, 4], &[4, 1]);
    let call = Op::Library(Library::Matmul { a: square(0), b: square(0), bias: None, out: square(1) });
    let buffers = vec![(BufferKind::Input(0), 16), (BufferKind::Workspace, 16)];
    match bare.try_stage(&plan(buffers, vec![call]), &Data { inputs: vec![vec![vec![1.0; 16]]], ..Data::default() }) {
        Err(error) if error.code() == "library_failed" => Ok(()),
        Err(error) => Err(text(error)),
        Ok(_) => Err("it was accepted".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_takes_every_convolution_of_the_test() {
        for (name, case) in conv_cases() {
            let checked = crate::plan::validate(&conv_plan(&case), &crate::plan::Limits::default());
            assert_eq!(checked, Ok(()), "{name}");
        }
    }

    #[test]
    fn the_expected_convolution_agrees_with_sums_done_by_hand() {
        let case = ConvCase {
            x: vec![1, 1, 3],
            weight: vec![1, 1, 2],
            out: vec![1, 1, 2],
            stride: vec![1],
            padding: vec![0],
            dilation: vec![1],
            groups: 1,
            transposed: false,
            last: false,
            tf32: false,
            half: false,
        };
        let x = tensor(0, &case.x, &[3, 3, 1]);
        let w = tensor(1, &case.weight, &[2, 2, 1]);
        let got = expected_conv(&case, (&x, &[1.0, 2.0, 3.0]), (&w, &[10.0, 1.0]), &[100.0]);
        assert_eq!(got, [112.0, 123.0]);
        let case = ConvCase { x: vec![1, 1, 2], out: vec![1, 1, 3], transposed: true, ..case };
        let x = tensor(0, &case.x, &[2, 2, 1]);
        let got = expected_conv(&case, (&x, &[1.0, 2.0]), (&w, &[10.0, 1.0]), &[0.0]);
        assert_eq!(got, [10.0, 21.0, 2.0]);
    }

    #[test]
    fn halves_come_out_as_they_went_in() {
        let values = [0.0, 1.0, -1.0, 0.00390625, -2.0, 1.75, 65504.0];
        let packed = pack(&values);
        assert_eq!((packed.len(), packed[0].to_bits()), (7, 0x3c00_0000));
        assert_eq!(unpack(&packed, 7), values);
        assert_eq!(unpack(&[f32::from_bits(0x7c00_0001)], 2), [2f32.powi(-24), f32::INFINITY]);
    }
}
