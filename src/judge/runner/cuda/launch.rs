//! A launch, checked and encoded against the kernel's own parameter table and the card's limits.
//!
//! The decisions (`encode`, `refusal`) are pure; `Ready` holds what a launch needs and puts it on the stream.
//! Must not know other nodes.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::super::{Fault, LaunchInfo, half_bits};
use super::driver::{Context, DeviceInfo, Module, attribute, check, parameters};
use crate::plan::{Arg, Launch};

/// Most local memory of one thread, in bytes.
const LOCAL_PER_THREAD: u64 = 64 << 10;
/// Most local memory that a launch may make the context reserve for all resident threads, in bytes.
const LOCAL_TOTAL: u64 = 4 << 30;

/// Encodes arguments for parameters of the given sizes. `address` gives a buffer's address.
///
/// # Errors
/// `arguments`, naming the first that doesn't fit.
pub fn encode(
    args: &[Arg],
    table: &[(usize, usize)],
    address: impl Fn(usize) -> Option<u64>,
) -> Result<Vec<[u8; 8]>, Fault> {
    if args.len() != table.len() {
        let why = format!("{} arguments were given, the kernel takes {}", args.len(), table.len());
        return Err(Fault::new("arguments", why));
    }
    let refuse = |why: String| Err(Fault::new("arguments", why));
    args.iter()
        .zip(table)
        .enumerate()
        .map(|(n, (arg, &(_, size)))| {
            let exact = |bytes: &[u8], kind: &str| {
                if bytes.len() != size {
                    return refuse(format!(
                        "argument {n} is a {kind} of {} bytes, the kernel's parameter has {size}",
                        bytes.len()
                    ));
                }
                let mut word = [0u8; 8];
                if let Some(part) = word.get_mut(..bytes.len()) {
                    part.copy_from_slice(bytes);
                }
                Ok(word)
            };
            match *arg {
                Arg::Pointer { buffer, offset } => {
                    let Some(start) = address(buffer) else {
                        return refuse(format!("argument {n}: there is no buffer {buffer}"));
                    };
                    exact(&start.wrapping_add(offset).to_le_bytes(), "pointer")
                }
                Arg::Null => exact(&0u64.to_le_bytes(), "pointer"),
                Arg::Int(value) => {
                    let bits = u32::try_from(size).unwrap_or(64) * 8;
                    if !matches!(size, 1 | 2 | 4 | 8) {
                        return refuse(format!("argument {n} is an integer, the kernel's parameter has {size} bytes"));
                    }
                    // Either reading of the parameter, signed or not, must hold the value.
                    if bits < 64 && !(-(1i64 << (bits - 1))..1i64 << bits).contains(&value) {
                        return refuse(format!("argument {n}: {value} doesn't fit into {size} bytes"));
                    }
                    let mut word = value.to_le_bytes();
                    word.iter_mut().skip(size).for_each(|byte| *byte = 0);
                    Ok(word)
                }
                #[allow(clippy::cast_possible_truncation)]
                Arg::Float(value) => match size {
                    8 => exact(&value.to_le_bytes(), "double"),
                    4 => exact(&(value as f32).to_le_bytes(), "float"),
                    _ => refuse(format!(
                        "argument {n} is a float, the kernel's parameter has {size} bytes; say kf.f16, kf.f32 or kf.f64"
                    )),
                },
                Arg::F16(value) => exact(&half_bits(value).to_le_bytes(), "half"),
                #[allow(clippy::cast_possible_truncation)]
                Arg::F32(value) => exact(&(value as f32).to_le_bytes(), "float"),
                Arg::F64(value) => exact(&value.to_le_bytes(), "double"),
                Arg::I32(value) => exact(&value.to_le_bytes(), "32-bit integer"),
                Arg::I64(value) => exact(&value.to_le_bytes(), "64-bit integer"),
                Arg::U32(value) => exact(&value.to_le_bytes(), "unsigned 32-bit integer"),
                Arg::U8(value) => exact(&[value], "byte"),
            }
        })
        .collect()
}

/// What a kernel takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub registers: u64,
    pub static_shared: u64,
    pub local: u64,
    pub max_threads: u64,
}

/// Why the card can't run this launch, if it can't.
#[must_use]
pub fn refusal(launch: &Launch, needs: Needs, card: &DeviceInfo) -> Option<String> {
    let [x, y, z] = launch.grid;
    let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
    let positive = |n: i32| u64::try_from(n).unwrap_or(0);
    let shared = needs.static_shared + u64::from(launch.shared);
    if launch.grid.contains(&0) || launch.block.contains(&0) {
        return Some("grid and block must be at least 1 in each dimension".into());
    }
    if x > 0x7fff_ffff || y > 65_535 || z > 65_535 {
        return Some(format!("the grid {x} x {y} x {z} is over 2147483647 x 65535 x 65535"));
    }
    if threads > needs.max_threads.min(positive(card.max_threads_per_block)) || launch.block[2] > 64 {
        return Some(format!("a block of {threads} threads; this kernel takes at most {}", needs.max_threads));
    }
    if shared > positive(card.shared_memory_per_block_optin) {
        return Some(format!("{shared} bytes of shared memory; the card has {}", card.shared_memory_per_block_optin));
    }
    if needs.local > LOCAL_PER_THREAD {
        return Some(format!("{} bytes of local memory a thread; at most {LOCAL_PER_THREAD} are allowed", needs.local));
    }
    let resident = positive(card.multi_processor_count) * positive(card.max_threads_per_multi_processor);
    if needs.local.saturating_mul(resident) > LOCAL_TOTAL {
        return Some(format!("{} bytes of local memory a thread make over 4 GiB for {resident} threads", needs.local));
    }
    if let Some(cluster) = launch.cluster {
        let size = cluster.iter().map(|&n| u64::from(n)).product::<u64>();
        if card.major < 9 {
            return Some("clusters need compute capability 9.0".into());
        }
        if size == 0 || size > 16 || launch.grid.iter().zip(cluster).any(|(&g, c)| c == 0 || g % c != 0) {
            return Some("a cluster has 1 to 16 blocks and must divide the grid".into());
        }
    }
    if launch.cooperative && !card.cooperative_launch {
        return Some("the card knows no cooperative launch".into());
    }
    None
}

/// A launch that can be put on the stream.
pub struct Ready {
    function: sys::CUfunction,
    launch: Launch,
    args: Vec<[u8; 8]>,
}

impl Ready {
    /// Checks and prepares a launch.
    ///
    /// # Errors
    /// `symbol`, `arguments`, `launch_failed` (the card can't run it).
    pub fn new(
        context: &Context,
        module: &Module,
        launch: &Launch,
        node: usize,
        address: impl Fn(usize) -> Option<u64>,
    ) -> Result<(Self, LaunchInfo), Fault> {
        Self::prepare(context, module, launch, node, address).map_err(|f| f.at(node).of(&launch.kernel))
    }

    fn prepare(
        context: &Context,
        module: &Module,
        launch: &Launch,
        node: usize,
        address: impl Fn(usize) -> Option<u64>,
    ) -> Result<(Self, LaunchInfo), Fault> {
        let function = module.function(&launch.kernel)?;
        let args = encode(&launch.args, &parameters(function)?, address)?;
        let needs = Needs {
            registers: attribute(function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared: attribute(function, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local: attribute(function, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            max_threads: attribute(function, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        let card = &context.info;
        if let Some(why) = refusal(launch, needs, card) {
            return Err(Fault::new("launch_failed", why));
        }
        let set = |which: Attribute, value: i32, doing: &str| {
            // SAFETY: `function` belongs to a loaded module; the value is checked by the driver.
            check(unsafe { sys::cuFuncSetAttribute(function, which, value) }, doing)
        };
        let shared = needs.static_shared + u64::from(launch.shared);
        if launch.shared > 0 {
            // All that is left beside the static part: several launches of one kernel may ask for different
            // sizes, and the attribute is the kernel's, not the launch's.
            let most = i64::from(card.shared_memory_per_block_optin) - needs.static_shared.cast_signed();
            let most = i32::try_from(most).unwrap_or(0);
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most, "asking for shared memory")?;
        }
        if launch.cluster.is_some_and(|c| c.iter().product::<u32>() > 8) {
            let which = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            set(which, 1, "asking for a large cluster")?;
        }
        let threads = launch.block.iter().product::<u32>();
        let mut blocks = 0;
        let (block, dynamic) = (i32::try_from(threads).unwrap_or(i32::MAX), launch.shared as usize);
        // SAFETY: `blocks` is valid for a write, `function` belongs to a loaded module.
        let result =
            unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, function, block, dynamic) };
        check(result, "asking for the occupancy")?;
        let blocks = u64::try_from(blocks).unwrap_or(0);
        if blocks == 0 {
            return Err(Fault::new(
                "launch_failed",
                "not one block fits on a multiprocessor (registers, shared memory)",
            ));
        }
        if launch.cooperative {
            let room = blocks * u64::try_from(card.multi_processor_count).unwrap_or(0);
            let grid = launch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
            if grid > room {
                let why = format!("a cooperative grid of {grid} blocks; {room} can be resident together");
                return Err(Fault::new("launch_failed", why));
            }
        }
        let ready = Self { function, launch: launch.clone(), args };
        if launch.cluster.is_some() {
            let mut clusters = 0;
            let result = ready.configured(context.stream, |config| {
                // SAFETY: `clusters` is valid for a write, `config` and its attributes live for the call.
                unsafe { sys::cuOccupancyMaxActiveClusters(&raw mut clusters, function, config) }
            });
            check(result, "asking for the occupancy of clusters")?;
            if clusters == 0 {
                return Err(Fault::new("launch_failed", "not one cluster of that size fits on the card"));
            }
        }
        let most = u64::try_from(card.max_threads_per_multi_processor).unwrap_or(1).max(1);
        let info = LaunchInfo {
            node,
            kernel: launch.kernel.clone(),
            registers: u32::try_from(needs.registers).unwrap_or(u32::MAX),
            shared_bytes: shared,
            local_bytes: needs.local,
            #[allow(clippy::cast_precision_loss)]
            occupancy: (blocks * u64::from(threads)) as f64 / most as f64,
        };
        Ok((ready, info))
    }

    fn configured<R>(&self, stream: sys::CUstream, act: impl FnOnce(*const sys::CUlaunchConfig) -> R) -> R {
        // SAFETY: attributes are plain data (a number and a union of plain data); number 0 is a member.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if let Some([x, y, z]) = self.launch.cluster {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if self.launch.cooperative {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attributes[count].value.cooperative = 1;
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: self.launch.grid[0],
            gridDimY: self.launch.grid[1],
            gridDimZ: self.launch.grid[2],
            blockDimX: self.launch.block[0],
            blockDimY: self.launch.block[1],
            blockDimZ: self.launch.block[2],
            sharedMemBytes: self.launch.shared,
            hStream: stream,
            attrs: if count == 0 { std::ptr::null_mut() } else { attributes.as_mut_ptr() },
            numAttrs: u32::try_from(count).unwrap_or(0),
        };
        act(&raw const config)
    }

    /// Puts the launch on the stream.
    ///
    /// # Errors
    /// `launch_failed` and the like.
    pub fn issue(&self, stream: sys::CUstream) -> Result<(), Fault> {
        let mut pointers: Vec<*mut c_void> = self.args.iter().map(|a| a.as_ptr().cast_mut().cast()).collect();
        let result = self.configured(stream, |config| {
            // SAFETY: `pointers` has one entry a parameter (encode has asked), each pointing to at least as
            // many bytes as the parameter has; the driver copies them before it returns and writes nothing.
            unsafe { sys::cuLaunchKernelEx(config, self.function, pointers.as_mut_ptr(), std::ptr::null_mut()) }
        });
        check(result, &format!("launching `{}`", self.launch.kernel)).map_err(|mut fault| {
            if fault.code == "cuda" {
                fault.code = "launch_failed".into();
            }
            fault
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn one(arg: Arg, size: usize) -> Result<[u8; 8], Fault> {
        encode(&[arg], &[(0, size)], |b| (b == 0).then_some(0x1000)).map(|v| v[0])
    }

    #[test]
    fn integers_take_the_width_of_the_parameter_signed_or_not() {
        assert_eq!(one(Arg::Int(-1), 4).unwrap(), [255, 255, 255, 255, 0, 0, 0, 0]);
        assert_eq!(one(Arg::Int(0xffff_ffff), 4).unwrap(), [255, 255, 255, 255, 0, 0, 0, 0]);
        assert_eq!(one(Arg::Int(255), 1).unwrap()[0], 255);
        assert_eq!(one(Arg::Int(i64::MIN), 8).unwrap(), i64::MIN.to_le_bytes());
        assert!(one(Arg::Int(1 << 32), 4).is_err());
        assert!(one(Arg::Int(-129), 1).is_err());
        assert!(one(Arg::Int(0), 16).is_err());
    }

    #[test]
    fn floats_are_single_unless_the_parameter_has_eight_bytes() {
        assert_eq!(one(Arg::Float(0.1), 4).unwrap()[..4], 0.1f32.to_le_bytes());
        assert_eq!(one(Arg::Float(0.1), 8).unwrap(), 0.1f64.to_le_bytes());
        assert!(one(Arg::Float(0.1), 2).is_err());
        assert_eq!(one(Arg::F16(1.0), 2).unwrap()[..2], [0, 0x3c]);
        assert!(one(Arg::F64(1.0), 4).is_err());
    }

    #[test]
    fn pointers_need_a_buffer_and_eight_bytes() {
        assert_eq!(one(Arg::Pointer { buffer: 0, offset: 16 }, 8).unwrap(), 0x1010u64.to_le_bytes());
        assert!(one(Arg::Pointer { buffer: 1, offset: 0 }, 8).is_err());
        assert!(one(Arg::Pointer { buffer: 0, offset: 0 }, 4).is_err());
        assert_eq!(one(Arg::Null, 8).unwrap(), [0; 8]);
        assert!(encode(&[], &[(0, 8)], |_| None).unwrap_err().message.contains("takes 1"));
    }

    #[test]
    fn a_launch_that_the_card_cannot_run_is_refused_with_the_reason() {
        let card = DeviceInfo {
            major: 9,
            multi_processor_count: 132,
            max_threads_per_multi_processor: 2048,
            max_threads_per_block: 1024,
            shared_memory_per_block_optin: 232_448,
            cooperative_launch: true,
            ..DeviceInfo::default()
        };
        let good = Launch {
            module: 0,
            kernel: "k".into(),
            grid: [8, 1, 1],
            block: [256, 1, 1],
            shared: 100_000,
            cluster: Some([2, 1, 1]),
            cooperative: false,
            args: vec![],
        };
        let needs = Needs { registers: 32, static_shared: 1024, local: 0, max_threads: 1024 };
        assert_eq!(refusal(&good, needs, &card), None);
        let why = |change: &dyn Fn(&mut Launch, &mut Needs)| {
            let (mut launch, mut needs) = (good.clone(), needs);
            change(&mut launch, &mut needs);
            refusal(&launch, needs, &card).unwrap()
        };
        assert!(why(&|l, _| l.grid[1] = 70_000).contains("grid"));
        assert!(why(&|l, _| l.grid[0] = 0).contains("at least 1"));
        assert!(why(&|l, _| l.block[0] = 2048).contains("2048 threads"));
        assert!(why(&|l, _| l.shared = 232_000).contains("shared"));
        assert!(why(&|_, n| n.local = 65_537).contains("local"));
        assert!(why(&|_, n| n.local = 40_000).contains("4 GiB"));
        assert!(why(&|l, _| l.cluster = Some([3, 1, 1])).contains("divide"));
    }
}
