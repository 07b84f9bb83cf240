//! Devices, and what they can do.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use cudarc::driver::sys::{CUdevice, CUdevice_attribute, CUuuid};
use serde::{Deserialize, Serialize};

use super::error::{CudaError, check};
use super::functions::{call, functions};
use super::provider::Provider;

/// The version of the driver: of the latest CUDA that it serves, or of HIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DriverVersion {
    /// As 13.
    pub major: u32,
    /// As 1.
    pub minor: u32,
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Begins with CUDA. An error on a machine that has none.
pub fn driver_version() -> Result<DriverVersion, CudaError> {
    init()?;
    let mut version = 0;
    // SAFETY: `version` is a place for the result.
    unsafe { call!(cuDriverGetVersion(&raw mut version)) }?;
    let version = version.unsigned_abs();
    Ok(match provider()? {
        Provider::Cuda => DriverVersion { major: version / 1000, minor: version % 1000 / 10 },
        Provider::Hip => DriverVersion { major: version / 10_000_000, minor: version % 10_000_000 / 100_000 },
    })
}

/// Whose devices this process uses. An error on a machine that has none.
pub fn provider() -> Result<Provider, CudaError> {
    functions().map(|functions| functions.provider)
}

/// Harmless when repeated.
fn init() -> Result<(), CudaError> {
    // SAFETY: it may be called at any time, by any thread.
    unsafe { call!(cuInit(0)) }
}

/// One of this process's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    pub(super) raw: CUdevice,
    ordinal: u32,
}

/// Says which device it is, in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceUuid(pub [u8; 16]);

/// What a device can do, and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// Whether a stream can wait for words of 64 bits, and write them.
    WordsOf64Bits,
    /// Whether device memory can be had apart from addresses.
    VirtualMemory,
    /// Whether such memory can be handed to another process as a file descriptor.
    MemoryAsDescriptor,
    /// Who may use the device: [`ComputeMode`](https://docs.nvidia.com/cuda/cuda-driver-api/)'s number, 0 for everybody.
    ComputeMode,
    /// How many multiprocessors it has.
    Multiprocessors,
    /// The major part of its compute capability.
    CapabilityMajor,
    /// The minor part.
    CapabilityMinor,
}

/// What is asked for of `hipDeviceProp_tR0600`, whose layout stays as the number in its name says.
#[repr(C, align(8))]
struct Properties {
    _before: [u8; 1160],
    architecture: [u8; 256],
    _behind: [u8; 2680],
}

impl Attribute {
    /// Its number as CUDA has it, and as HIP has it.
    fn raw(self) -> (CUdevice_attribute, c_int) {
        use CUdevice_attribute::*;
        match self {
            Attribute::WordsOf64Bits => (CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 10_013),
            Attribute::VirtualMemory => {
                (CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 89)
            }
            // HIP has no such question: descriptors are all that it hands over.
            Attribute::MemoryAsDescriptor => (CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 89),
            Attribute::ComputeMode => (CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 6),
            Attribute::Multiprocessors => (CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 63),
            Attribute::CapabilityMajor => (CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 23),
            Attribute::CapabilityMinor => (CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 61),
        }
    }
}

impl Device {
    /// How many devices this process sees.
    pub fn count() -> Result<u32, CudaError> {
        init()?;
        let mut count: c_int = 0;
        // SAFETY: `count` is a place for the result.
        unsafe { call!(cuDeviceGetCount(&raw mut count)) }?;
        Ok(count.unsigned_abs())
    }

    /// The device of this number, as PyTorch counts too.
    pub fn new(ordinal: u32) -> Result<Device, CudaError> {
        init()?;
        let mut raw = 0;
        // SAFETY: `raw` is a place for the result.
        unsafe { call!(cuDeviceGet(&raw mut raw, ordinal as c_int)) }?;
        Ok(Device { raw, ordinal })
    }

    /// Its number in this process.
    pub fn ordinal(self) -> u32 {
        self.ordinal
    }

    /// What it is called.
    pub fn name(self) -> Result<String, CudaError> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: `name` has room for that many bytes.
        unsafe { call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, self.raw)) }?;
        let bytes = name.map(|byte| byte as u8);
        Ok(CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// Its name in every process.
    pub fn uuid(self) -> Result<DeviceUuid, CudaError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` is a place for the result.
        unsafe { call!(cuDeviceGetUuid_v2(&raw mut uuid, self.raw)) }?;
        Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
    }

    /// What AMD's compilers call a device of HIP, as `gfx942:sramecc+:xnack-`.
    pub fn architecture(self) -> Result<String, CudaError> {
        let functions = functions()?;
        let missing = CudaError::NoFunction { function: "hipGetDevicePropertiesR0600" };
        let properties = functions.properties.ok_or(missing)?;
        let mut found = Properties { _before: [0; 1160], architecture: [0; 256], _behind: [0; 2680] };
        // SAFETY: `found` is a place for the result, and longer than that is.
        let raw = unsafe { properties((&raw mut found).cast(), self.raw) };
        check(raw, || "hipGetDevicePropertiesR0600")?;
        Ok(CStr::from_bytes_until_nul(&found.architecture).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// A number, or 0 or 1 for no or yes.
    pub fn attribute(self, attribute: Attribute) -> Result<u32, CudaError> {
        let (cuda, hip) = attribute.raw();
        let number = if provider()? == Provider::Hip { hip } else { cuda as c_int };
        let mut value: c_int = 0;
        // SAFETY: `value` is a place for the result.
        unsafe { call!(cuDeviceGetAttribute(&raw mut value, number, self.raw)) }?;
        Ok(value.unsigned_abs())
    }

    /// Whether it reaches the memory of another one.
    pub fn reaches(self, other: Device) -> Result<bool, CudaError> {
        let mut can: c_int = 0;
        // SAFETY: `can` is a place for the result.
        unsafe { call!(cuDeviceCanAccessPeer(&raw mut can, self.raw, other.raw)) }?;
        Ok(can != 0)
    }
}
