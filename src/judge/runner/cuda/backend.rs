//! Descriptors of cuDNN's graph interface: made, filled in, read and destroyed.
//!
//! Every failure names the descriptor, the attribute and what the library says. The type that an attribute is
//! sent as follows from the Rust type of its values. Must not know convolutions.

use std::ffi::{c_int, c_void};

use cudarc::cudnn::sys;

use super::super::Fault;
use super::library::Dnn;

pub use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendAttributeType_t as Type;
pub use sys::cudnnBackendDescriptorType_t as Kind;

/// A value of an attribute.
pub trait Value: Copy {
    const TYPE: Type;
}

macro_rules! values {
    ($($rust:ty => $kind:ident;)*) => {
        $(impl Value for $rust {
            const TYPE: Type = Type::$kind;
        })*
    };
}

values! {
    i64 => CUDNN_TYPE_INT64;
    f32 => CUDNN_TYPE_FLOAT;
    f64 => CUDNN_TYPE_DOUBLE;
    *mut c_void => CUDNN_TYPE_VOID_PTR;
    sys::cudnnHandle_t => CUDNN_TYPE_HANDLE;
    sys::cudnnDataType_t => CUDNN_TYPE_DATA_TYPE;
    sys::cudnnConvolutionMode_t => CUDNN_TYPE_CONVOLUTION_MODE;
    sys::cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE;
}

/// A descriptor, destroyed when it is dropped.
pub struct Descriptor {
    raw: sys::cudnnBackendDescriptor_t,
    kind: Kind,
    destroy: unsafe extern "C" fn(sys::cudnnBackendDescriptor_t) -> c_int,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `Descriptor::new`, destroyed once. The library stays loaded for good. An error
        // leaves nothing to be done.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

fn checked(table: &Dnn, status: c_int, kind: Kind, doing: &str) -> Result<(), Fault> {
    if status == 0 {
        return Ok(());
    }
    let said = match table.said() {
        said if said.is_empty() => String::new(),
        said => format!(" ({said})"),
    };
    Err(Fault::new("library_failed", format!("cuDNN: {kind:?}: {doing}: status {status}{said}")))
}

impl Descriptor {
    /// An empty descriptor. Those that the library fills in stay so; others are filled in, then finished.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn new(table: &Dnn, kind: Kind) -> Result<Self, Fault> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is valid for a write.
        let status = unsafe { (table.cudnnBackendCreateDescriptor)(kind, &raw mut raw) };
        checked(table, status, kind, "create")?;
        Ok(Self { raw, kind, destroy: table.cudnnBackendDestroyDescriptor })
    }

    fn send(&self, table: &Dnn, name: Name, what: Type, count: usize, from: *const c_void) -> Result<(), Fault> {
        let count = i64::try_from(count).map_err(|e| Fault::new("internal", e.to_string()))?;
        // SAFETY: `from` has `count` values of the type announced, which the library copies.
        let status = unsafe { (table.cudnnBackendSetAttribute)(self.raw, name, what, count, from) };
        checked(table, status, self.kind, &format!("set {name:?}"))
    }

    /// Sets an attribute to a list of values.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn set<T: Value>(&self, table: &Dnn, name: Name, values: &[T]) -> Result<(), Fault> {
        self.send(table, name, T::TYPE, values.len(), values.as_ptr().cast())
    }

    /// Sets an attribute to another descriptor, which must be finished.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn refer(&self, table: &Dnn, name: Name, other: &Self) -> Result<(), Fault> {
        self.send(table, name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, (&raw const other.raw).cast())
    }

    /// Checks what was set; the descriptor can be used from then on.
    ///
    /// # Errors
    /// `library_failed`, also where the library or this card can't do it.
    pub fn finish(self, table: &Dnn) -> Result<Self, Fault> {
        // SAFETY: the descriptor lives.
        let status = unsafe { (table.cudnnBackendFinalize)(self.raw) };
        checked(table, status, self.kind, "finalize")?;
        Ok(self)
    }

    /// Reads up to `room` values into `to`, and says how many there are.
    fn receive(&self, table: &Dnn, name: Name, what: Type, room: usize, to: *mut c_void) -> Result<usize, Fault> {
        let room = i64::try_from(room).map_err(|e| Fault::new("internal", e.to_string()))?;
        let mut count = 0i64;
        // SAFETY: `to` has room for as many values as announced; `count` is valid for a write.
        let status = unsafe { (table.cudnnBackendGetAttribute)(self.raw, name, what, room, &raw mut count, to) };
        checked(table, status, self.kind, &format!("get {name:?}"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// One number.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn number(&self, table: &Dnn, name: Name) -> Result<i64, Fault> {
        let mut value = 0i64;
        self.receive(table, name, Type::CUDNN_TYPE_INT64, 1, (&raw mut value).cast())?;
        Ok(value)
    }

    /// The numerical notes of an engine, as numbers: a newer library may have notes that an enumeration lacks.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn notes(&self, table: &Dnn) -> Result<Vec<c_int>, Fault> {
        let mut notes = vec![-1; sys::cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_TYPE_COUNT as usize];
        let (name, what) = (Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Type::CUDNN_TYPE_NUMERICAL_NOTE);
        let count = self.receive(table, name, what, notes.len(), notes.as_mut_ptr().cast())?;
        notes.truncate(count);
        Ok(notes)
    }

    /// The descriptor that an attribute holds.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn member(&self, table: &Dnn, name: Name, kind: Kind) -> Result<Self, Fault> {
        let mut member = Self::new(table, kind)?;
        let to = (&raw mut member.raw).cast();
        self.receive(table, name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, to)?;
        Ok(member)
    }

    /// All descriptors that an attribute holds, in their order.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn members(&self, table: &Dnn, name: Name, kind: Kind) -> Result<Vec<Self>, Fault> {
        let what = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        let count = self.receive(table, name, what, 0, std::ptr::null_mut())?;
        let mut members = (0..count).map(|_| Self::new(table, kind)).collect::<Result<Vec<_>, _>>()?;
        // The library fills in the descriptors that it is given; it doesn't replace them.
        let mut raw: Vec<_> = members.iter().map(|m| m.raw).collect();
        let filled = self.receive(table, name, what, raw.len(), raw.as_mut_ptr().cast())?;
        members.truncate(filled);
        Ok(members)
    }

    /// Puts a finished plan on the stream that the library was given.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn execute(&self, table: &Dnn, handle: sys::cudnnHandle_t, pack: &Self) -> Result<(), Fault> {
        // SAFETY: both are finished; whoever made the pack answers for its addresses.
        let status = unsafe { (table.cudnnBackendExecute)(handle, self.raw, pack.raw) };
        checked(table, status, self.kind, "execute")
    }
}
