//! Convolutions by cuDNN's graph interface, chosen as PyTorch chooses: forward, and transposed as the gradient
//! of the data.
//!
//! PyTorch describes one convolution as a graph, asks for the library's instant heuristics, then for its
//! fallback list, leaves out configurations of other arithmetic, and takes the first that can be built, has
//! room for its scratch memory and runs. So do we, with the same descriptions, and one condition more: that it
//! can be captured. A bias is added by a second call, as PyTorch does.
//! `describe` decides without a device; it must not know addresses.

use std::ffi::{c_int, c_void};

use cudarc::cudnn::sys;

use super::super::{Arithmetic, Fault};
use super::backend::{Descriptor, Kind, Name};
use super::driver::{Context, Graph};
use super::library::{Dnn, Libraries, check};
use crate::plan::{Dtype, TensorRef};

/// Names of the three tensors in the graph; PyTorch's.
const IDS: [i64; 3] = ['x' as i64, 'y' as i64, 'w' as i64];

/// A convolution of the plan.
pub struct Request<'a> {
    pub x: &'a TensorRef,
    pub weight: &'a TensorRef,
    pub bias: Option<&'a TensorRef>,
    pub out: &'a TensorRef,
    pub stride: &'a [u32],
    pub padding: &'a [u32],
    pub dilation: &'a [u32],
    pub transposed: bool,
}

/// Sizes and strides of a tensor.
pub type Extents = (Vec<i64>, Vec<i64>);

/// Sizes as cuDNN takes them; one spatial dimension is written as two, the first of height 1. How many groups
/// there are follows from the channels of `x` and `weight`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub x: Extents,
    pub out: Extents,
    pub weight: Extents,
    pub channels_last: bool,
    pub padding: Vec<i64>,
    pub stride: Vec<i64>,
    pub dilation: Vec<i64>,
}

fn wide(value: u64) -> Result<i64, Fault> {
    i64::try_from(value).map_err(|_| Fault::new("library_failed", "conv: a size is over 2^63"))
}

fn int(value: i64) -> Result<c_int, Fault> {
    c_int::try_from(value).map_err(|_| Fault::new("library_failed", "conv: with a bias, no size may be over 2^31"))
}

/// Are these the strides of a contiguous tensor whose dimensions lie in `order` (outermost first)? Dimensions
/// of size 1 may have any stride, and items of the batch may lie further apart.
fn ordered(shape: &[u64], strides: &[u64], order: &[usize]) -> bool {
    let mut expected = 1u64;
    order.iter().rev().all(|&d| match (shape.get(d), strides.get(d)) {
        (Some(&size), Some(&stride)) => {
            let fits = size == 1 || stride == expected || (d == 0 && stride > expected);
            expected = expected.saturating_mul(size);
            fits
        }
        _ => false,
    })
}

fn layouts(tensor: &TensorRef) -> (bool, bool) {
    let rank = tensor.shape.len();
    let plain: Vec<usize> = (0..rank).collect();
    let mut last: Vec<usize> = (0..rank).filter(|&d| d != 1).collect();
    last.push(1);
    (ordered(&tensor.shape, &tensor.strides, &plain), ordered(&tensor.shape, &tensor.strides, &last))
}

/// Works out sizes and strides.
///
/// # Errors
/// `library_failed` where cuDNN can't express it.
pub fn describe(request: &Request<'_>) -> Result<Description, Fault> {
    let refuse = |why: String| Err(Fault::new("library_failed", format!("conv: {why}")));
    let (x, weight, out) = (request.x, request.weight, request.out);
    let rank = x.shape.len();
    if !(3..=5).contains(&rank) || weight.shape.len() != rank || out.shape.len() != rank {
        return refuse("x, weight and output must have the same rank, 3 to 5".into());
    }
    let spatial = rank - 2;
    if [request.stride, request.padding, request.dilation].iter().any(|list| list.len() != spatial) {
        return refuse(format!("stride, padding and dilation need {spatial} numbers each"));
    }
    let (x_plain, x_last) = layouts(x);
    // PyTorch packs a filter whose items lie apart before it calls the library.
    let dense = weight.shape[0] == 1 || weight.strides[0] == weight.shape[1..].iter().product::<u64>();
    let (w_plain, w_last) = layouts(weight);
    let (w_plain, w_last) = (w_plain && dense, w_last && dense);
    let (o_plain, o_last) = layouts(out);
    let channels_last = if x_plain && w_plain && o_plain {
        false
    } else if x_last && w_last && o_last {
        true
    } else {
        return refuse(
            "x, weight and output must all be contiguous or all channels-last; \
             make the weight so in the constructor or in work on parameters alone"
                .into(),
        );
    };
    if let Some(bias) = request.bias {
        let channels = out.shape[1];
        if bias.shape != [channels] || (bias.strides != [1] && channels != 1) || bias.dtype != out.dtype {
            return refuse("the bias must be contiguous, one number an output channel, of the output's type".into());
        }
    }
    // Strides are worked out anew: those of dimensions of size 1 may be anything, and cuDNN looks at them.
    let sizes = |tensor: &TensorRef| -> Result<Extents, Fault> {
        let mut shape = tensor.shape.clone();
        if spatial == 1 {
            shape.insert(2, 1);
        }
        let n = shape.len();
        let order: Vec<usize> =
            if channels_last { [0].into_iter().chain(2..n).chain([1]).collect() } else { (0..n).collect() };
        let mut strides = vec![0; n];
        let mut step = 1u64;
        for &d in order.iter().rev() {
            strides[d] = wide(step)?;
            step = step.saturating_mul(shape[d].max(1));
        }
        if shape[0] > 1 {
            strides[0] = wide(tensor.strides[0])?;
        }
        Ok((shape.into_iter().map(wide).collect::<Result<_, _>>()?, strides))
    };
    let list = |values: &[u32], first: u64| -> Result<Vec<i64>, Fault> {
        let front = (spatial == 1).then_some(first);
        front.into_iter().chain(values.iter().map(|&v| u64::from(v))).map(wide).collect()
    };
    Ok(Description {
        x: sizes(x)?,
        out: sizes(out)?,
        weight: sizes(weight)?,
        channels_last,
        padding: list(request.padding, 0)?,
        stride: list(request.stride, 1)?,
        dilation: list(request.dilation, 1)?,
    })
}

/// The alignment that PyTorch states for an address: the largest power of two up to 32 that divides it.
fn alignment(address: u64) -> i64 {
    1 << address.trailing_zeros().min(5)
}

/// Is an engine with these notes one that PyTorch leaves out?
fn left_out(notes: &[c_int], dtype: Dtype, tf32: bool) -> bool {
    use sys::cudnnBackendNumericalNote_t as Note;
    let has = |note: Note| notes.iter().any(|&n| u32::try_from(n).is_ok_and(|n| n == note as u32));
    has(Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS)
        || (dtype == Dtype::Float32 && !tf32 && has(Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE))
}

/// The types of the data and of the sums.
fn types(dtype: Dtype) -> Result<(sys::cudnnDataType_t, sys::cudnnDataType_t), Fault> {
    use sys::cudnnDataType_t as Data;
    match dtype {
        Dtype::Float32 => Ok((Data::CUDNN_DATA_FLOAT, Data::CUDNN_DATA_FLOAT)),
        Dtype::Float16 => Ok((Data::CUDNN_DATA_HALF, Data::CUDNN_DATA_FLOAT)),
        Dtype::Bfloat16 => Ok((Data::CUDNN_DATA_BFLOAT16, Data::CUDNN_DATA_FLOAT)),
        Dtype::Float64 => Ok((Data::CUDNN_DATA_DOUBLE, Data::CUDNN_DATA_DOUBLE)),
        other => Err(Fault::new("library_failed", format!("conv: no convolution of {other:?}"))),
    }
}

fn tensor(
    table: &Dnn,
    kind: sys::cudnnDataType_t,
    (shape, strides): &Extents,
    id: i64,
    address: u64,
) -> Result<Descriptor, Fault> {
    let made = Descriptor::new(table, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    made.set(table, Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[kind])?;
    made.set(table, Name::CUDNN_ATTR_TENSOR_DIMENSIONS, shape)?;
    made.set(table, Name::CUDNN_ATTR_TENSOR_STRIDES, strides)?;
    made.set(table, Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
    made.set(table, Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[alignment(address)])?;
    made.finish(table)
}

/// The graph of one convolution. `addresses` are those of the tensors that the graph calls x, y and w.
fn graph(
    table: &Dnn,
    handle: sys::cudnnHandle_t,
    sizes: &Description,
    dtype: Dtype,
    transposed: bool,
    addresses: [u64; 3],
) -> Result<Descriptor, Fault> {
    let (data, sum) = types(dtype)?;
    // A transposed convolution is the gradient of the data: what it reads is the gradient of the output.
    let (near, far) = if transposed { (&sizes.out, &sizes.x) } else { (&sizes.x, &sizes.out) };
    let x = tensor(table, data, near, IDS[0], addresses[0])?;
    let y = tensor(table, data, far, IDS[1], addresses[1])?;
    let w = tensor(table, data, &sizes.weight, IDS[2], addresses[2])?;

    let conv = Descriptor::new(table, Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, &[sum])?;
    let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, &[mode])?;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[wide(sizes.stride.len() as u64)?])?;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &sizes.padding)?;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &sizes.padding)?;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, &sizes.dilation)?;
    conv.set(table, Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &sizes.stride)?;
    let conv = conv.finish(table)?;

    let (kind, [of_x, of_y, of_w, of_conv, alpha, beta]) = if transposed {
        (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            ],
        )
    } else {
        (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            ],
        )
    };
    let operation = Descriptor::new(table, kind)?;
    operation.refer(table, of_x, &x)?;
    operation.refer(table, of_y, &y)?;
    operation.refer(table, of_w, &w)?;
    operation.refer(table, of_conv, &conv)?;
    // The scale is a double for doubles and a float for all else.
    if dtype == Dtype::Float64 {
        operation.set(table, alpha, &[1f64])?;
        operation.set(table, beta, &[0f64])?;
    } else {
        operation.set(table, alpha, &[1f32])?;
        operation.set(table, beta, &[0f32])?;
    }
    let operation = operation.finish(table)?;

    let graph = Descriptor::new(table, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    graph.refer(table, Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operation)?;
    graph.set(table, Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle])?;
    graph.finish(table)
}

/// The library's configurations for a graph, best first.
fn configurations(
    table: &Dnn,
    graph: &Descriptor,
    mode: sys::cudnnBackendHeurMode_t,
) -> Result<Vec<Descriptor>, Fault> {
    let asked = Descriptor::new(table, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    asked.refer(table, Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?;
    asked.set(table, Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
    asked.finish(table)?.members(table, Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)
}

fn plan(table: &Dnn, configuration: &Descriptor) -> Result<Descriptor, Fault> {
    let plan = Descriptor::new(table, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    plan.refer(table, Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)?;
    plan.finish(table)
}

/// A prepared convolution.
pub struct Conv {
    plan: Descriptor,
    /// The plan's own; dropped after it.
    _configuration: Descriptor,
    /// Scratch memory that it needs.
    pub workspace: u64,
    /// Of what the graph calls x, y and w.
    addresses: [u64; 3],
    bias: Option<Bias>,
}

/// A sum over the output, by the library's older interface.
#[derive(Clone, Copy)]
struct Bias {
    bias: sys::cudnnTensorDescriptor_t,
    out: sys::cudnnTensorDescriptor_t,
    addresses: [u64; 2],
    double: bool,
}

impl Bias {
    fn new(table: &Dnn, sizes: &Description, dtype: Dtype, addresses: [u64; 2]) -> Result<Self, Fault> {
        let (data, _) = types(dtype)?;
        let describe = |(shape, strides): &Extents| {
            let ints = |list: &[i64]| list.iter().map(|&v| int(v)).collect::<Result<Vec<_>, _>>();
            let (shape, strides) = (ints(shape)?, ints(strides)?);
            let rank = int(wide(shape.len() as u64)?)?;
            let mut made = std::ptr::null_mut();
            // SAFETY: `made` is valid for a write.
            check(unsafe { (table.cudnnCreateTensorDescriptor)(&raw mut made) }, "describing a bias")?;
            // SAFETY: both lists have `rank` numbers, which the library copies.
            let status =
                unsafe { (table.cudnnSetTensorNdDescriptor)(made, data, rank, shape.as_ptr(), strides.as_ptr()) };
            check(status, "describing a bias").map(|()| made)
        };
        let channels = sizes.out.0[1];
        let mut shape = vec![1; sizes.out.0.len()];
        shape[1] = channels;
        let mut strides = vec![1; shape.len()];
        strides[0] = channels;
        let bias = describe(&(shape, strides))?;
        Ok(Self { bias, out: describe(&sizes.out)?, addresses, double: dtype == Dtype::Float64 })
    }

    fn call(&self, table: &Dnn, handle: sys::cudnnHandle_t) -> Result<(), Fault> {
        let (one, one64) = (1f32, 1f64);
        let scale: *const c_void = if self.double { (&raw const one64).cast() } else { (&raw const one).cast() };
        let [bias, out] = self.addresses.map(|address| address as *mut c_void);
        // SAFETY: the descriptions were made for exactly these tensors; the scale is read before the call
        // returns. `out = 1 * bias + 1 * out`, the bias repeated along all but the channels.
        let status = unsafe { (table.cudnnAddTensor)(handle, scale, self.bias, bias, scale, self.out, out) };
        check(status, "adding a convolution's bias")
    }
}

impl Conv {
    /// Chooses a configuration and tries it. `at` gives the address of a tensor, `scratch` at least so many
    /// bytes of memory; `try_now` is false where the trial would write into a buffer whose content matters.
    ///
    /// # Errors
    /// `library_failed` where none works.
    pub fn new(
        libraries: &mut Libraries,
        context: &Context,
        request: &Request<'_>,
        arithmetic: Arithmetic,
        at: impl Fn(&TensorRef) -> Result<u64, Fault>,
        scratch: &mut dyn FnMut(u64) -> Result<u64, Fault>,
        try_now: bool,
    ) -> Result<Option<Self>, Fault> {
        if request.out.shape.contains(&0) {
            return Ok(None);
        }
        let dtype = request.out.dtype;
        if request.x.dtype != dtype || request.weight.dtype != dtype {
            return Err(Fault::new("library_failed", "conv: x, weight and output must have one type"));
        }
        let sizes = describe(request)?;
        let (from, to, weight) = (at(request.x)?, at(request.out)?, at(request.weight)?);
        let addresses = if request.transposed { [to, from, weight] } else { [from, to, weight] };
        let (table, handle) = libraries.dnn(context.stream.cast())?;
        let graph = graph(table, handle, &sizes, dtype, request.transposed, addresses)?;
        let bias = match request.bias {
            Some(bias) => Some(Bias::new(table, &sizes, dtype, [at(bias)?, to])?),
            None => None,
        };
        // Room for a trial, then the trial itself.
        let mut attempt = |configuration: Descriptor| -> Result<Self, Fault> {
            let plan = plan(table, &configuration)?;
            let workspace = plan.number(table, Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
            let workspace = u64::try_from(workspace).unwrap_or(0);
            let memory = scratch(workspace).map_err(|fault| {
                Fault::new(&fault.code, format!("{workspace} bytes of cuDNN's scratch memory: {}", fault.message))
            })?;
            let conv = Self { plan, _configuration: configuration, workspace, addresses, bias };
            if try_now {
                conv.call(table, handle, memory)?;
                context.wait("trying a convolution")?;
                Graph::capture(context, || conv.call(table, handle, memory))?;
            }
            Ok(conv)
        };
        let mut refused = Vec::new();
        let mut others = 0;
        use sys::cudnnBackendHeurMode_t as Mode;
        for mode in [Mode::CUDNN_HEUR_MODE_INSTANT, Mode::CUDNN_HEUR_MODE_FALLBACK] {
            let configurations = match configurations(table, &graph, mode) {
                Ok(configurations) => configurations,
                Err(fault) => {
                    refused.push(fault);
                    continue;
                }
            };
            for configuration in configurations {
                // PyTorch takes an engine that can't be asked for one without notes.
                let notes = configuration
                    .member(table, Name::CUDNN_ATTR_ENGINECFG_ENGINE, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)
                    .and_then(|engine| engine.notes(table))
                    .unwrap_or_default();
                if left_out(&notes, dtype, arithmetic.conv_tf32) {
                    others += 1;
                    continue;
                }
                match attempt(configuration) {
                    Ok(conv) => return Ok(Some(conv)),
                    Err(fault) => refused.push(fault),
                }
            }
        }
        let count = refused.len();
        let code = refused.first().map_or("library_failed", |fault| fault.code.as_str()).to_owned();
        refused.dedup_by(|a, b| a.message == b.message);
        let why: Vec<&str> = refused.iter().map(|fault| fault.message.as_str()).take(4).collect();
        let why = if why.is_empty() { "none was proposed".into() } else { why.join("; ") };
        let message = format!(
            "cuDNN has no configuration for this convolution: {count} failed, {others} are of another arithmetic: {why}"
        );
        Err(Fault::new(&code, message))
    }

    /// Puts the convolution on the stream that the library was given. `scratch` has `workspace` bytes.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn issue(&self, libraries: &Libraries, scratch: u64) -> Result<(), Fault> {
        let (table, handle) = libraries.ready_dnn()?;
        self.call(table, handle, scratch)
    }

    fn call(&self, table: &Dnn, handle: sys::cudnnHandle_t, scratch: u64) -> Result<(), Fault> {
        let pack = Descriptor::new(table, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        let pointers = self.addresses.map(|address| address as *mut c_void);
        pack.set(table, Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?;
        pack.set(table, Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &IDS)?;
        let scratch = if self.workspace == 0 { std::ptr::null_mut() } else { scratch as *mut c_void };
        pack.set(table, Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[scratch])?;
        self.plan.execute(table, handle, &pack.finish(table)?)?;
        self.bias.map_or(Ok(()), |bias| bias.call(table, handle))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn bare(shape: &[u64], strides: &[u64]) -> TensorRef {
        TensorRef { buffer: 0, offset: 0, dtype: Dtype::Float32, shape: shape.into(), strides: strides.into() }
    }

    fn request<'a>(x: &'a TensorRef, weight: &'a TensorRef, out: &'a TensorRef, one: &'a [u32]) -> Request<'a> {
        Request { x, weight, bias: None, out, stride: one, padding: one, dilation: one, transposed: false }
    }

    #[test]
    fn one_dimension_is_written_as_two_with_a_height_of_one() {
        let (x, w) = (bare(&[2, 3, 10], &[30, 10, 1]), bare(&[4, 3, 3], &[9, 3, 1]));
        let out = bare(&[2, 4, 10], &[40, 10, 1]);
        let d = describe(&request(&x, &w, &out, &[1])).unwrap();
        assert_eq!(d.x, (vec![2, 3, 1, 10], vec![30, 10, 10, 1]));
        assert_eq!(d.weight, (vec![4, 3, 1, 3], vec![9, 3, 3, 1]));
        assert_eq!((d.padding, d.stride), (vec![0, 1], vec![1, 1]));
    }

    #[test]
    fn channels_last_is_known_by_its_strides() {
        let (x, w) = (bare(&[2, 3, 8, 8], &[192, 1, 24, 3]), bare(&[4, 3, 3, 3], &[27, 1, 9, 3]));
        let out = bare(&[2, 4, 8, 8], &[256, 1, 32, 4]);
        let d = describe(&request(&x, &w, &out, &[1, 1])).unwrap();
        assert!(d.channels_last);
        assert_eq!(d.out.1, [256, 1, 32, 4]);
        let plain = bare(&[4, 3, 3, 3], &[27, 9, 3, 1]);
        let error = describe(&request(&x, &plain, &out, &[1, 1])).unwrap_err();
        assert!(error.message.contains("weight"), "{error}");
    }

    #[test]
    fn items_of_a_batch_may_lie_apart_and_filters_may_not() {
        let (x, w) = (bare(&[2, 3, 8, 8], &[500, 64, 8, 1]), bare(&[4, 3, 3, 3], &[27, 9, 3, 1]));
        let out = bare(&[2, 4, 8, 8], &[256, 64, 8, 1]);
        assert_eq!(describe(&request(&x, &w, &out, &[1, 1])).unwrap().x.1, [500, 64, 8, 1]);
        let apart = bare(&[4, 3, 3, 3], &[30, 9, 3, 1]);
        assert!(describe(&request(&x, &apart, &out, &[1, 1])).is_err());
    }

    #[test]
    fn dimensions_of_size_one_may_have_any_stride() {
        let (x, w) = (bare(&[1, 1, 8, 8], &[999, 7, 8, 1]), bare(&[4, 1, 3, 3], &[9, 1, 3, 1]));
        let out = bare(&[1, 4, 8, 8], &[256, 64, 8, 1]);
        let d = describe(&request(&x, &w, &out, &[1, 1])).unwrap();
        assert!(!d.channels_last);
        assert_eq!(d.x.1, [64, 64, 8, 1]);
    }

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_32() {
        assert_eq!([0, 1, 2, 12, 16, 96, 512].map(alignment), [32, 1, 2, 4, 16, 32, 32]);
    }

    #[test]
    fn engines_of_another_arithmetic_are_left_out() {
        use sys::cudnnBackendNumericalNote_t as Note;
        let core = [Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE as c_int];
        let down = [Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS as c_int];
        assert!(left_out(&core, Dtype::Float32, false) && !left_out(&core, Dtype::Float32, true));
        assert!(!left_out(&core, Dtype::Float16, false) && !left_out(&core, Dtype::Float64, false));
        assert!(left_out(&down, Dtype::Float32, true) && left_out(&down, Dtype::Float16, true));
        assert!(!left_out(&[99, -1], Dtype::Float32, false));
    }
}
