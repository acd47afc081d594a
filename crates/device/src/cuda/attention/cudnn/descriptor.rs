//! cuDNN's descriptors: makes them, sets attributes, finalises and frees them.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use cudarc::cudnn::sys;
use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendAttributeType_t as Type;
use sys::cudnnBackendDescriptorType_t as Kind;

/// A refused request with cuDNN's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub String);

pub(super) fn succeed(what: impl std::fmt::Debug, status: sys::cudnnStatus_t) -> Result<(), Refusal> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut words = [0u8; 512];
    // SAFETY: the library is open, and writes at most that many bytes, the last of them zero.
    unsafe { sys::cudnnGetLastErrorString(words.as_mut_ptr().cast(), words.len()) };
    let words = CStr::from_bytes_until_nul(&words).map_or_else(|_| "".into(), CStr::to_string_lossy);
    let words = words.lines().next().unwrap_or_default();
    Err(Refusal(format!("{what:?}: {status:?} {words}")))
}

/// A descriptor of cuDNN's backend. The library must be open.
pub(super) struct Descriptor {
    raw: sys::cudnnBackendDescriptor_t,
    kind: Kind,
}

// SAFETY: descriptors belong to no thread.
unsafe impl Send for Descriptor {}

impl Descriptor {
    pub fn new(kind: Kind) -> Result<Descriptor, Refusal> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library is open.
        succeed(kind, unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) })?;
        Ok(Descriptor { raw, kind })
    }

    pub fn raw(&self) -> sys::cudnnBackendDescriptor_t {
        self.raw
    }

    /// Sets an attribute to some values of the type that it has.
    fn set<T>(&mut self, name: Name, of: Type, values: &[T]) -> Result<(), Refusal> {
        let (count, values) = (values.len() as i64, values.as_ptr().cast::<c_void>());
        // SAFETY: `values` are so many; the callers below pair each type with cuDNN's name of it.
        succeed(name, unsafe { sys::cudnnBackendSetAttribute(self.raw, name, of, count, values) })
    }

    pub fn set_integers(&mut self, name: Name, values: &[i64]) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_INT64, values)
    }

    pub fn set_floats(&mut self, name: Name, values: &[f32]) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_FLOAT, values)
    }

    pub fn set_true(&mut self, name: Name) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_BOOLEAN, &[true])
    }

    pub fn set_data_type(&mut self, name: Name, value: sys::cudnnDataType_t) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_DATA_TYPE, &[value])
    }

    pub fn set_pointwise(&mut self, value: sys::cudnnPointwiseMode_t) -> Result<(), Refusal> {
        self.set(Name::CUDNN_ATTR_POINTWISE_MODE, Type::CUDNN_TYPE_POINTWISE_MODE, &[value])
    }

    pub fn set_reduction(&mut self, value: sys::cudnnReduceTensorOp_t) -> Result<(), Refusal> {
        self.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &[value])
    }

    pub fn set_heuristic(&mut self, value: sys::cudnnBackendHeurMode_t) -> Result<(), Refusal> {
        self.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE, &[value])
    }

    pub fn set_handle(&mut self, name: Name, handle: sys::cudnnHandle_t) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_HANDLE, &[handle])
    }

    pub fn set_text(&mut self, name: Name, text: &[u8]) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_CHAR, text)
    }

    pub fn set_addresses(&mut self, name: Name, addresses: &[*mut c_void]) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_VOID_PTR, addresses)
    }

    pub fn set_descriptors(&mut self, name: Name, others: &[&Descriptor]) -> Result<(), Refusal> {
        let others: Vec<sys::cudnnBackendDescriptor_t> = others.iter().map(|other| other.raw).collect();
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &others)
    }

    pub fn finalize(self) -> Result<Descriptor, Refusal> {
        // SAFETY: the descriptor lives.
        succeed(self.kind, unsafe { sys::cudnnBackendFinalize(self.raw) })?;
        Ok(self)
    }

    /// The number of elements of an attribute; copies as many as fit in `to`.
    fn get<T>(&self, name: Name, of: Type, to: &mut [T]) -> Result<usize, Refusal> {
        let mut count = 0;
        // Without a destination, cuDNN answers with the number of elements.
        let room = if to.is_empty() { None } else { NonNull::new(to.as_mut_ptr()) };
        let place = room.map_or(std::ptr::null_mut(), |room| room.as_ptr().cast::<c_void>());
        // SAFETY: `to` has room for so many, and the callers below pair each type with cuDNN's name of it.
        let status = unsafe { sys::cudnnBackendGetAttribute(self.raw, name, of, to.len() as i64, &mut count, place) };
        succeed(name, status)?;
        Ok(count.max(0) as usize)
    }

    pub fn integer(&self, name: Name) -> Result<i64, Refusal> {
        let mut value = [0];
        self.get(name, Type::CUDNN_TYPE_INT64, &mut value)?;
        Ok(value[0])
    }

    pub fn text(&self, name: Name) -> Result<Vec<u8>, Refusal> {
        let len = self.get::<u8>(name, Type::CUDNN_TYPE_CHAR, &mut [])?;
        let mut text = vec![0; len];
        let len = self.get(name, Type::CUDNN_TYPE_CHAR, &mut text)?;
        text.truncate(len);
        Ok(text)
    }

    /// At most `most` descriptors that an attribute consists of.
    pub fn descriptors(&self, name: Name, kind: Kind, most: usize) -> Result<Vec<Descriptor>, Refusal> {
        let of = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        let count = self.get::<sys::cudnnBackendDescriptor_t>(name, of, &mut [])?.min(most);
        // cuDNN fills descriptors that the caller made.
        let mut found = (0..count).map(|_| Descriptor::new(kind)).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<sys::cudnnBackendDescriptor_t> = found.iter().map(|one| one.raw).collect();
        let count = self.get(name, of, &mut raw)?;
        found.truncate(count);
        Ok(found)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and let go once.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}
