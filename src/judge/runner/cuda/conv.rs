//! Convolutions by cuDNN's stable interface: forward, and transposed as the gradient of the data.
//!
//! The algorithm is the first of the library's heuristic order that runs and can be captured. PyTorch asks
//! the same library through its graph interface, whose order may differ: a candidate's library call can then
//! be a little faster or slower than the reference's. A bias is added by a second call, as PyTorch does.
//! `describe` decides without a device; it must not know addresses.

use std::ffi::{c_int, c_void};

use cudarc::cudnn::sys;

use super::super::{Arithmetic, Fault};
use super::driver::{Context, Graph};
use super::library::{Dnn, Libraries, check};
use crate::plan::{Dtype, TensorRef};

/// Most scratch memory that an algorithm may take, in bytes.
const WORKSPACE_LIMIT: u64 = 4 << 30;

/// A convolution of the plan.
pub struct Request<'a> {
    pub x: &'a TensorRef,
    pub weight: &'a TensorRef,
    pub bias: Option<&'a TensorRef>,
    pub out: &'a TensorRef,
    pub stride: &'a [u32],
    pub padding: &'a [u32],
    pub dilation: &'a [u32],
    pub groups: u32,
    pub transposed: bool,
}

/// Sizes as cuDNN takes them; one spatial dimension is written as two, the first of height 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub x: (Vec<c_int>, Vec<c_int>),
    pub out: (Vec<c_int>, Vec<c_int>),
    pub weight: Vec<c_int>,
    pub channels_last: bool,
    pub padding: Vec<c_int>,
    pub stride: Vec<c_int>,
    pub dilation: Vec<c_int>,
    pub groups: c_int,
}

fn int(value: u64) -> Result<c_int, Fault> {
    c_int::try_from(value).map_err(|_| Fault::new("library_failed", "conv: a size is over 2^31"))
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
    // A filter's description has no strides: it must be dense.
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
    let sizes = |tensor: &TensorRef| -> Result<(Vec<c_int>, Vec<c_int>), Fault> {
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
            strides[d] = int(step)?;
            step = step.saturating_mul(shape[d].max(1));
        }
        if shape[0] > 1 {
            strides[0] = int(tensor.strides[0])?;
        }
        Ok((shape.into_iter().map(int).collect::<Result<_, _>>()?, strides))
    };
    let list = |values: &[u32], first: u64| -> Result<Vec<c_int>, Fault> {
        let front = (spatial == 1).then_some(first);
        front.into_iter().chain(values.iter().map(|&v| u64::from(v))).map(int).collect()
    };
    Ok(Description {
        x: sizes(x)?,
        out: sizes(out)?,
        weight: sizes(weight)?.0,
        channels_last,
        padding: list(request.padding, 0)?,
        stride: list(request.stride, 1)?,
        dilation: list(request.dilation, 1)?,
        groups: int(u64::from(request.groups))?,
    })
}

#[derive(Clone, Copy)]
enum Algorithm {
    Forward(sys::cudnnConvolutionFwdAlgo_t),
    Transposed(sys::cudnnConvolutionBwdDataAlgo_t),
}

/// A prepared convolution.
pub struct Conv {
    x: sys::cudnnTensorDescriptor_t,
    out: sys::cudnnTensorDescriptor_t,
    weight: sys::cudnnFilterDescriptor_t,
    conv: sys::cudnnConvolutionDescriptor_t,
    bias: Option<(sys::cudnnTensorDescriptor_t, u64)>,
    algorithm: Algorithm,
    /// Scratch memory that it needs.
    pub workspace: u64,
    addresses: [u64; 3],
    double: bool,
}

fn tensor_descriptor(
    table: &Dnn,
    kind: sys::cudnnDataType_t,
    shape: &[c_int],
    strides: &[c_int],
) -> Result<sys::cudnnTensorDescriptor_t, Fault> {
    let mut made = std::ptr::null_mut();
    // SAFETY: `made` is valid for a write.
    check(unsafe { (table.cudnnCreateTensorDescriptor)(&raw mut made) }, "describing a tensor")?;
    let rank = int(shape.len() as u64)?;
    // SAFETY: both lists have `rank` numbers, which the library copies.
    let status = unsafe { (table.cudnnSetTensorNdDescriptor)(made, kind, rank, shape.as_ptr(), strides.as_ptr()) };
    check(status, "describing a tensor")?;
    Ok(made)
}

impl Conv {
    /// Chooses an algorithm and tries it. `at` gives the address of a tensor, `scratch` at least so many bytes
    /// of memory; `try_now` is false where the trial would write into a buffer whose content matters.
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
        use sys::cudnnDataType_t as Kind;
        use sys::cudnnMathType_t as Math;
        let (kind, compute, math) = match dtype {
            Dtype::Float32 if arithmetic.conv_tf32 => {
                (Kind::CUDNN_DATA_FLOAT, Kind::CUDNN_DATA_FLOAT, Math::CUDNN_DEFAULT_MATH)
            }
            Dtype::Float32 => (Kind::CUDNN_DATA_FLOAT, Kind::CUDNN_DATA_FLOAT, Math::CUDNN_FMA_MATH),
            Dtype::Float16 => (Kind::CUDNN_DATA_HALF, Kind::CUDNN_DATA_FLOAT, Math::CUDNN_TENSOR_OP_MATH),
            Dtype::Bfloat16 => (Kind::CUDNN_DATA_BFLOAT16, Kind::CUDNN_DATA_FLOAT, Math::CUDNN_TENSOR_OP_MATH),
            Dtype::Float64 => (Kind::CUDNN_DATA_DOUBLE, Kind::CUDNN_DATA_DOUBLE, Math::CUDNN_DEFAULT_MATH),
            other => return Err(Fault::new("library_failed", format!("conv: no convolution of {other:?}"))),
        };
        let sizes = describe(request)?;
        let addresses = [at(request.x)?, at(request.weight)?, at(request.out)?];
        let (table, handle) = libraries.dnn(context.stream.cast())?;
        let x = tensor_descriptor(table, kind, &sizes.x.0, &sizes.x.1)?;
        let out = tensor_descriptor(table, kind, &sizes.out.0, &sizes.out.1)?;
        let bias = match request.bias {
            Some(bias) => {
                let channels = sizes.out.0[1];
                let mut shape = vec![1; sizes.out.0.len()];
                shape[1] = channels;
                let mut strides = vec![1; shape.len()];
                strides[0] = channels;
                Some((tensor_descriptor(table, kind, &shape, &strides)?, at(bias)?))
            }
            None => None,
        };
        let mut weight = std::ptr::null_mut();
        // SAFETY: `weight` is valid for a write.
        check(unsafe { (table.cudnnCreateFilterDescriptor)(&raw mut weight) }, "describing a filter")?;
        let format = if sizes.channels_last {
            sys::cudnnTensorFormat_t::CUDNN_TENSOR_NHWC
        } else {
            sys::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW
        };
        let rank = int(sizes.weight.len() as u64)?;
        // SAFETY: the list has `rank` numbers, which the library copies.
        let status = unsafe { (table.cudnnSetFilterNdDescriptor)(weight, kind, format, rank, sizes.weight.as_ptr()) };
        check(status, "describing a filter")?;
        let mut conv = std::ptr::null_mut();
        // SAFETY: `conv` is valid for a write.
        check(unsafe { (table.cudnnCreateConvolutionDescriptor)(&raw mut conv) }, "describing a convolution")?;
        let spatial = int(sizes.stride.len() as u64)?;
        // SAFETY: the three lists have `spatial` numbers each, which the library copies.
        let status = unsafe {
            (table.cudnnSetConvolutionNdDescriptor)(
                conv,
                spatial,
                sizes.padding.as_ptr(),
                sizes.stride.as_ptr(),
                sizes.dilation.as_ptr(),
                sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION,
                compute,
            )
        };
        check(status, "describing a convolution")?;
        // SAFETY: `conv` was created above.
        check(unsafe { (table.cudnnSetConvolutionGroupCount)(conv, sizes.groups) }, "describing a convolution")?;
        let set_math = |math| {
            // SAFETY: `conv` was created above.
            check(unsafe { (table.cudnnSetConvolutionMathType)(conv, math) }, "describing a convolution")
        };
        set_math(math)?;
        let mut prepared = Self {
            x,
            out,
            weight,
            conv,
            bias,
            algorithm: Algorithm::Forward(sys::cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM),
            workspace: 0,
            addresses,
            double: dtype == Dtype::Float64,
        };
        let choices = prepared.choices(table, handle, request.transposed)?;
        let mut last = Fault::new("library_failed", "cuDNN proposes no algorithm for this convolution");
        for (algorithm, proposed) in choices {
            // Without TF32 every choice must stay with fused multiply-add; else the library's own proposal.
            set_math(if math == Math::CUDNN_FMA_MATH { math } else { proposed })?;
            let Ok(workspace) = prepared.needs(table, handle, algorithm) else { continue };
            if workspace > WORKSPACE_LIMIT {
                last = Fault::new("library_failed", format!("cuDNN's algorithm wants {workspace} bytes of scratch"));
                continue;
            }
            let Ok(memory) = scratch(workspace) else {
                last = Fault::new("memory", format!("no room for {workspace} bytes of cuDNN's scratch memory"));
                continue;
            };
            prepared.algorithm = algorithm;
            prepared.workspace = workspace;
            if !try_now {
                return Ok(Some(prepared));
            }
            let tried = prepared
                .call(table, handle, memory)
                .and_then(|()| context.wait("trying a convolution"))
                .and_then(|()| Graph::capture(context, || prepared.call(table, handle, memory)).map(|_| ()));
            match tried {
                Ok(()) => return Ok(Some(prepared)),
                Err(fault) => last = fault,
            }
        }
        Err(last)
    }

    /// The library's proposals, best first, with the arithmetic that each is meant for.
    fn choices(
        &self,
        table: &Dnn,
        handle: sys::cudnnHandle_t,
        transposed: bool,
    ) -> Result<Vec<(Algorithm, sys::cudnnMathType_t)>, Fault> {
        const MOST: usize = 16;
        let mut count = 0;
        let room = int(MOST as u64)?;
        let taken = |count: c_int| usize::try_from(count).unwrap_or(0).min(MOST);
        if transposed {
            // SAFETY: plain data for the library to fill in; zero is a member of each enumeration in it.
            let mut found: [sys::cudnnConvolutionBwdDataAlgoPerf_t; MOST] = unsafe { std::mem::zeroed() };
            // SAFETY: the descriptions live; `found` has the room announced.
            let status = unsafe {
                (table.cudnnGetConvolutionBackwardDataAlgorithm_v7)(
                    handle,
                    self.weight,
                    self.x,
                    self.conv,
                    self.out,
                    room,
                    &raw mut count,
                    found.as_mut_ptr(),
                )
            };
            check(status, "choosing an algorithm for a transposed convolution")?;
            let good = found.iter().take(taken(count)).filter(|f| f.status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS);
            return Ok(good.map(|f| (Algorithm::Transposed(f.algo), f.mathType)).collect());
        }
        // SAFETY: as above.
        let mut found: [sys::cudnnConvolutionFwdAlgoPerf_t; MOST] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let status = unsafe {
            (table.cudnnGetConvolutionForwardAlgorithm_v7)(
                handle,
                self.x,
                self.weight,
                self.conv,
                self.out,
                room,
                &raw mut count,
                found.as_mut_ptr(),
            )
        };
        check(status, "choosing an algorithm for a convolution")?;
        let good = found.iter().take(taken(count)).filter(|f| f.status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS);
        Ok(good.map(|f| (Algorithm::Forward(f.algo), f.mathType)).collect())
    }

    fn needs(&self, table: &Dnn, handle: sys::cudnnHandle_t, algorithm: Algorithm) -> Result<u64, Fault> {
        let mut bytes = 0usize;
        // SAFETY: the descriptions live; `bytes` is valid for a write.
        let status = unsafe {
            match algorithm {
                Algorithm::Forward(algorithm) => (table.cudnnGetConvolutionForwardWorkspaceSize)(
                    handle,
                    self.x,
                    self.weight,
                    self.conv,
                    self.out,
                    algorithm,
                    &raw mut bytes,
                ),
                Algorithm::Transposed(algorithm) => (table.cudnnGetConvolutionBackwardDataWorkspaceSize)(
                    handle,
                    self.weight,
                    self.x,
                    self.conv,
                    self.out,
                    algorithm,
                    &raw mut bytes,
                ),
            }
        };
        check(status, "asking for a convolution's scratch memory")?;
        Ok(bytes as u64)
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
        let (one, zero, one64, zero64) = (1f32, 0f32, 1f64, 0f64);
        // The scale is a double for doubles and a float for all else.
        let (alpha, beta): (*const c_void, *const c_void) = if self.double {
            ((&raw const one64).cast(), (&raw const zero64).cast())
        } else {
            ((&raw const one).cast(), (&raw const zero).cast())
        };
        let pointer = |address: u64| address as *mut c_void;
        let [x, weight, out] = self.addresses.map(pointer);
        let bytes = usize::try_from(self.workspace).unwrap_or(0);
        let scratch = if bytes == 0 { std::ptr::null_mut() } else { pointer(scratch) };
        // SAFETY: descriptions were made for exactly these tensors, the scratch memory has the size that the
        // library asked for; alpha and beta are read before the call returns.
        let status = unsafe {
            match self.algorithm {
                Algorithm::Forward(algorithm) => (table.cudnnConvolutionForward)(
                    handle,
                    alpha,
                    self.x,
                    x,
                    self.weight,
                    weight,
                    self.conv,
                    algorithm,
                    scratch,
                    bytes,
                    beta,
                    self.out,
                    out,
                ),
                Algorithm::Transposed(algorithm) => (table.cudnnConvolutionBackwardData)(
                    handle,
                    alpha,
                    self.weight,
                    weight,
                    self.x,
                    x,
                    self.conv,
                    algorithm,
                    scratch,
                    bytes,
                    beta,
                    self.out,
                    out,
                ),
            }
        };
        check(status, "a convolution")?;
        if let Some((description, address)) = self.bias {
            // SAFETY: as above; `out = 1 * bias + 1 * out`, the bias repeated along all but the channels.
            let status =
                unsafe { (table.cudnnAddTensor)(handle, alpha, description, pointer(address), alpha, self.out, out) };
            check(status, "adding a convolution's bias")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tensor(shape: &[u64], strides: &[u64]) -> TensorRef {
        TensorRef { buffer: 0, offset: 0, dtype: Dtype::Float32, shape: shape.into(), strides: strides.into() }
    }

    fn request<'a>(x: &'a TensorRef, weight: &'a TensorRef, out: &'a TensorRef, one: &'a [u32]) -> Request<'a> {
        Request { x, weight, bias: None, out, stride: one, padding: one, dilation: one, groups: 1, transposed: false }
    }

    #[test]
    fn one_dimension_is_written_as_two_with_a_height_of_one() {
        let (x, w) = (tensor(&[2, 3, 10], &[30, 10, 1]), tensor(&[4, 3, 3], &[9, 3, 1]));
        let out = tensor(&[2, 4, 10], &[40, 10, 1]);
        let d = describe(&request(&x, &w, &out, &[1])).unwrap();
        assert_eq!(d.x, (vec![2, 3, 1, 10], vec![30, 10, 10, 1]));
        assert_eq!((d.weight, d.padding, d.stride), (vec![4, 3, 1, 3], vec![0, 1], vec![1, 1]));
    }

    #[test]
    fn channels_last_is_known_by_its_strides() {
        let (x, w) = (tensor(&[2, 3, 8, 8], &[192, 1, 24, 3]), tensor(&[4, 3, 3, 3], &[27, 1, 9, 3]));
        let out = tensor(&[2, 4, 8, 8], &[256, 1, 32, 4]);
        let d = describe(&request(&x, &w, &out, &[1, 1])).unwrap();
        assert!(d.channels_last);
        assert_eq!(d.out.1, [256, 1, 32, 4]);
        let plain = tensor(&[4, 3, 3, 3], &[27, 9, 3, 1]);
        let error = describe(&request(&x, &plain, &out, &[1, 1])).unwrap_err();
        assert!(error.message.contains("weight"), "{error}");
    }

    #[test]
    fn items_of_a_batch_may_lie_apart_and_filters_may_not() {
        let (x, w) = (tensor(&[2, 3, 8, 8], &[500, 64, 8, 1]), tensor(&[4, 3, 3, 3], &[27, 9, 3, 1]));
        let out = tensor(&[2, 4, 8, 8], &[256, 64, 8, 1]);
        assert_eq!(describe(&request(&x, &w, &out, &[1, 1])).unwrap().x.1, [500, 64, 8, 1]);
        let apart = tensor(&[4, 3, 3, 3], &[30, 9, 3, 1]);
        assert!(describe(&request(&x, &apart, &out, &[1, 1])).is_err());
    }

    #[test]
    fn dimensions_of_size_one_may_have_any_stride() {
        let (x, w) = (tensor(&[1, 1, 8, 8], &[999, 7, 8, 1]), tensor(&[4, 1, 3, 3], &[9, 1, 3, 1]));
        let out = tensor(&[1, 4, 8, 8], &[256, 64, 8, 1]);
        let d = describe(&request(&x, &w, &out, &[1, 1])).unwrap();
        assert!(!d.channels_last);
        assert_eq!(d.x.1, [64, 64, 8, 1]);
    }
}
