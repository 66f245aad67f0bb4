//! cuBLASLt and cuDNN, loaded from the very files that PyTorch uses.
//!
//! cudarc finds libraries by name on the loader's path, which may be another version; here a path is given.
//! Types are cudarc's, and each signature is checked against cudarc's at compile time. Status codes come back
//! as integers: a newer library may answer one that an enumeration lacks. Must not know plans.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

use cudarc::cublaslt::sys as lt;
use cudarc::cudnn::sys as dnn;

use super::super::Fault;

/// Opens a library for good, its symbols visible to those loaded after it.
fn open(path: &str) -> Result<*mut c_void, Fault> {
    let name = CString::new(path).map_err(|_| Fault::new("library_failed", "a library's path has a zero byte"))?;
    // SAFETY: `name` is a C string; the library is a vendor's, named by the supervisor.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: dlerror returns null or a C string.
        let why = unsafe {
            let text = libc::dlerror();
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        return Err(Fault::new("library_failed", format!("{path} can't be loaded: {why}")));
    }
    Ok(handle)
}

fn symbol(handle: *mut c_void, name: &'static str) -> Result<*mut c_void, Fault> {
    let text = CString::new(name).map_err(|_| Fault::new("internal", "a symbol has a zero byte"))?;
    // SAFETY: the handle is open for good, `text` a C string.
    let address = unsafe { libc::dlsym(handle, text.as_ptr()) };
    if address.is_null() {
        return Err(Fault::new("library_failed", format!("the library lacks `{name}`; another version is needed")));
    }
    Ok(address)
}

macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident, $sys:ident, $status:ty: $($name:ident($($arg:ty),*);)*
        $(| $void:ident($($void_arg:ty),*);)*
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub $void: unsafe extern "C" fn($($void_arg),*),)*
        }

        // The signatures are those of cudarc's generated bindings.
        $(const _: unsafe fn($($arg),*) -> $status = $sys::$name;)*
        $(const _: unsafe fn($($void_arg),*) = $sys::$void;)*

        impl $table {
            fn load(path: &str) -> Result<Self, Fault> {
                let handle = open(path)?;
                Ok(Self {
                    $($name: {
                        let address = symbol(handle, stringify!($name))?;
                        // SAFETY: the library's function of this name has this signature (checked above); its
                        // status is an enumeration, which C passes as an `int`.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(address) }
                    },)*
                    $($void: {
                        let address = symbol(handle, stringify!($void))?;
                        // SAFETY: as above; it answers nothing.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($void_arg),*)>(address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    /// cuBLASLt.
    Lt, lt, lt::cublasStatus_t:
    cublasLtCreate(*mut lt::cublasLtHandle_t);
    cublasLtMatmulDescCreate(*mut lt::cublasLtMatmulDesc_t, lt::cublasComputeType_t, lt::cudaDataType_t);
    cublasLtMatmulDescSetAttribute(lt::cublasLtMatmulDesc_t, lt::cublasLtMatmulDescAttributes_t, *const c_void, usize);
    cublasLtMatrixLayoutCreate(*mut lt::cublasLtMatrixLayout_t, lt::cudaDataType, u64, u64, i64);
    cublasLtMatrixLayoutSetAttribute(lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayoutAttribute_t, *const c_void, usize);
    cublasLtMatmulPreferenceCreate(*mut lt::cublasLtMatmulPreference_t);
    cublasLtMatmulPreferenceSetAttribute(lt::cublasLtMatmulPreference_t, lt::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize);
    cublasLtMatmulPreferenceDestroy(lt::cublasLtMatmulPreference_t);
    cublasLtMatmulAlgoGetHeuristic(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatmulPreference_t, c_int, *mut lt::cublasLtMatmulHeuristicResult_t, *mut c_int);
    cublasLtMatmul(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t, *mut c_void, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut c_void, usize, lt::cudaStream_t);
}

functions! {
    /// cuDNN: its graph interface, and the sum that a bias takes.
    Dnn, dnn, dnn::cudnnStatus_t:
    cudnnCreate(*mut dnn::cudnnHandle_t);
    cudnnSetStream(dnn::cudnnHandle_t, dnn::cudaStream_t);
    cudnnCreateTensorDescriptor(*mut dnn::cudnnTensorDescriptor_t);
    cudnnSetTensorNdDescriptor(dnn::cudnnTensorDescriptor_t, dnn::cudnnDataType_t, c_int, *const c_int, *const c_int);
    cudnnAddTensor(dnn::cudnnHandle_t, *const c_void, dnn::cudnnTensorDescriptor_t, *const c_void, *const c_void, dnn::cudnnTensorDescriptor_t, *mut c_void);
    cudnnBackendCreateDescriptor(dnn::cudnnBackendDescriptorType_t, *mut dnn::cudnnBackendDescriptor_t);
    cudnnBackendDestroyDescriptor(dnn::cudnnBackendDescriptor_t);
    cudnnBackendSetAttribute(dnn::cudnnBackendDescriptor_t, dnn::cudnnBackendAttributeName_t, dnn::cudnnBackendAttributeType_t, i64, *const c_void);
    cudnnBackendGetAttribute(dnn::cudnnBackendDescriptor_t, dnn::cudnnBackendAttributeName_t, dnn::cudnnBackendAttributeType_t, i64, *mut i64, *mut c_void);
    cudnnBackendFinalize(dnn::cudnnBackendDescriptor_t);
    cudnnBackendExecute(dnn::cudnnHandle_t, dnn::cudnnBackendDescriptor_t, dnn::cudnnBackendDescriptor_t);
    | cudnnGetLastErrorString(*mut c_char, usize);
}

impl Dnn {
    /// What the library says of its last failure; empty where it says nothing. Asking forgets it.
    pub fn said(&self) -> String {
        let mut text: [c_char; 512] = [0; 512];
        // SAFETY: `text` has the room announced and one more, which stays zero.
        unsafe { (self.cudnnGetLastErrorString)(text.as_mut_ptr(), text.len() - 1) };
        // SAFETY: the array ends with a zero byte.
        let said = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
        said.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Fails with what a library's status number means.
///
/// # Errors
/// `library_failed` unless `status` is 0.
pub fn check(status: c_int, doing: &str) -> Result<(), Fault> {
    if status == 0 {
        return Ok(());
    }
    Err(Fault::new("library_failed", format!("{doing}: status {status}")))
}

/// The libraries that a plan asks for.
#[derive(Default)]
pub struct Libraries {
    paths: BTreeMap<String, String>,
    lt: Option<(Lt, lt::cublasLtHandle_t)>,
    dnn: Option<(Dnn, dnn::cudnnHandle_t)>,
    others: bool,
}

impl Libraries {
    #[must_use]
    pub fn new(paths: BTreeMap<String, String>) -> Self {
        Self { paths, ..Self::default() }
    }

    fn path(&mut self, name: &str) -> Result<String, Fault> {
        if !self.others {
            self.others = true;
            for (other, path) in &self.paths {
                // cuBLAS needs cuBLASLt, which then is loaded already; cuDNN finds all by their names.
                if !matches!(other.as_str(), "cublaslt" | "cudnn" | "cublas") {
                    open(path)?;
                }
            }
            for other in ["cublaslt", "cublas"] {
                if let Some(path) = self.paths.get(other) {
                    open(path)?;
                }
            }
        }
        self.paths.get(name).cloned().ok_or_else(|| {
            Fault::new("library_failed", format!("the plan calls {name}, and `load` brought no path of it"))
        })
    }

    /// cuBLASLt and its handle.
    ///
    /// # Errors
    /// Where it can't be loaded.
    pub fn lt(&mut self) -> Result<(&Lt, lt::cublasLtHandle_t), Fault> {
        if self.lt.is_none() {
            let table = Lt::load(&self.path("cublaslt")?)?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: `handle` is valid for a write; a context is current.
            check(unsafe { (table.cublasLtCreate)(&raw mut handle) }, "starting cuBLASLt")?;
            self.lt = Some((table, handle));
        }
        match &self.lt {
            Some((table, handle)) => Ok((table, *handle)),
            None => Err(Fault::new("internal", "cuBLASLt is missing")),
        }
    }

    /// cuDNN and its handle, on `stream`.
    ///
    /// # Errors
    /// Where it can't be loaded.
    pub fn dnn(&mut self, stream: *mut c_void) -> Result<(&Dnn, dnn::cudnnHandle_t), Fault> {
        if self.dnn.is_none() {
            let table = Dnn::load(&self.path("cudnn")?)?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: `handle` is valid for a write; a context is current.
            check(unsafe { (table.cudnnCreate)(&raw mut handle) }, "starting cuDNN")?;
            // SAFETY: the stream belongs to the current context; both names mean the driver's stream.
            check(unsafe { (table.cudnnSetStream)(handle, stream.cast()) }, "giving cuDNN its stream")?;
            self.dnn = Some((table, handle));
        }
        match &self.dnn {
            Some((table, handle)) => Ok((table, *handle)),
            None => Err(Fault::new("internal", "cuDNN is missing")),
        }
    }

    /// The table of cuBLASLt once a call was prepared.
    ///
    /// # Errors
    /// Before that.
    pub fn ready_lt(&self) -> Result<(&Lt, lt::cublasLtHandle_t), Fault> {
        self.lt.as_ref().map(|(t, h)| (t, *h)).ok_or_else(|| Fault::new("internal", "cuBLASLt isn't loaded"))
    }

    /// The table of cuDNN once a call was prepared.
    ///
    /// # Errors
    /// Before that.
    pub fn ready_dnn(&self) -> Result<(&Dnn, dnn::cudnnHandle_t), Fault> {
        self.dnn.as_ref().map(|(t, h)| (t, *h)).ok_or_else(|| Fault::new("internal", "cuDNN isn't loaded"))
    }
}
