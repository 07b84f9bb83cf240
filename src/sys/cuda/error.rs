//! What a call of the driver may answer.

use std::fmt;

use super::provider::Provider;

/// Why something with CUDA did not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The machine has no driver for GPUs.
    #[error("there is no CUDA driver: no libcuda.so.1 could be loaded, nor HIP's libamdhip64.so.7")]
    NoDriver,
    /// The driver lacks a function, since it is too old.
    #[error("the driver has no {function}: {} and later have it", first_with(function))]
    NoFunction {
        /// Its name.
        function: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {}", in_words(call, *code))]
    Call {
        /// The driver's function.
        call: &'static str,
        /// What it returned.
        code: Code,
    },
}

impl CudaError {
    /// What the driver said, if it did.
    pub fn code(&self) -> Option<Code> {
        match self {
            CudaError::Call { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// `CUresult`: a number, so that one that a later driver invents is no undefined behaviour.
pub(super) type RawCode = u32;

/// An error if `raw` says so, of a call of this name.
pub(super) fn check(raw: RawCode, call: impl FnOnce() -> &'static str) -> Result<(), CudaError> {
    match raw {
        0 => Ok(()),
        raw => Err(CudaError::Call { call: call(), code: Code::from_raw(raw) }),
    }
}

/// The first release that has all functions which are used here.
fn first_with(function: &str) -> &'static str {
    if Provider::Hip.has(function) { "ROCm 7.1" } else { "CUDA 12.0" }
}

/// What the provider of a call calls its error. HIP's errors have the numbers of CUDA's.
fn in_words(call: &str, code: Code) -> String {
    let text = code.to_string();
    match text.strip_prefix("CUDA_ERROR_") {
        Some(rest) if Provider::Hip.has(call) => format!("HIP's error {rest}"),
        _ => text,
    }
}

macro_rules! codes {
    ($($code:ident = $raw:literal, $name:ident;)*) => {
        /// The errors of CUDA's driver, named as CUDA names them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "NVIDIA's manual has them")]
        pub enum Code {
            $($code,)*
            /// One that is not listed here.
            Unknown(u32),
        }

        impl Code {
            fn from_raw(raw: RawCode) -> Code {
                match raw {
                    $($raw => Code::$code,)*
                    raw => Code::Unknown(raw),
                }
            }
        }

        impl fmt::Display for Code {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Code::$code => write!(f, concat!(stringify!($name), " (", stringify!($raw), ")")),)*
                    Code::Unknown(raw) => write!(f, "an error that is not known here ({raw})"),
                }
            }
        }
    };
}

codes! {
    InvalidValue = 1, CUDA_ERROR_INVALID_VALUE;
    OutOfMemory = 2, CUDA_ERROR_OUT_OF_MEMORY;
    NotInitialized = 3, CUDA_ERROR_NOT_INITIALIZED;
    Deinitialized = 4, CUDA_ERROR_DEINITIALIZED;
    ProfilerDisabled = 5, CUDA_ERROR_PROFILER_DISABLED;
    ProfilerNotInitialized = 6, CUDA_ERROR_PROFILER_NOT_INITIALIZED;
    ProfilerAlreadyStarted = 7, CUDA_ERROR_PROFILER_ALREADY_STARTED;
    ProfilerAlreadyStopped = 8, CUDA_ERROR_PROFILER_ALREADY_STOPPED;
    StubLibrary = 34, CUDA_ERROR_STUB_LIBRARY;
    CallRequiresNewerDriver = 36, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER;
    DeviceUnavailable = 46, CUDA_ERROR_DEVICE_UNAVAILABLE;
    MulticastResourceFull = 47, CUDA_ERROR_MULTICAST_RESOURCE_FULL;
    NoDevice = 100, CUDA_ERROR_NO_DEVICE;
    InvalidDevice = 101, CUDA_ERROR_INVALID_DEVICE;
    DeviceNotLicensed = 102, CUDA_ERROR_DEVICE_NOT_LICENSED;
    InvalidImage = 200, CUDA_ERROR_INVALID_IMAGE;
    InvalidContext = 201, CUDA_ERROR_INVALID_CONTEXT;
    ContextAlreadyCurrent = 202, CUDA_ERROR_CONTEXT_ALREADY_CURRENT;
    MapFailed = 205, CUDA_ERROR_MAP_FAILED;
    UnmapFailed = 206, CUDA_ERROR_UNMAP_FAILED;
    ArrayIsMapped = 207, CUDA_ERROR_ARRAY_IS_MAPPED;
    AlreadyMapped = 208, CUDA_ERROR_ALREADY_MAPPED;
    NoBinaryForGpu = 209, CUDA_ERROR_NO_BINARY_FOR_GPU;
    AlreadyAcquired = 210, CUDA_ERROR_ALREADY_ACQUIRED;
    NotMapped = 211, CUDA_ERROR_NOT_MAPPED;
    NotMappedAsArray = 212, CUDA_ERROR_NOT_MAPPED_AS_ARRAY;
    NotMappedAsPointer = 213, CUDA_ERROR_NOT_MAPPED_AS_POINTER;
    EccUncorrectable = 214, CUDA_ERROR_ECC_UNCORRECTABLE;
    UnsupportedLimit = 215, CUDA_ERROR_UNSUPPORTED_LIMIT;
    ContextAlreadyInUse = 216, CUDA_ERROR_CONTEXT_ALREADY_IN_USE;
    PeerAccessUnsupported = 217, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    InvalidPtx = 218, CUDA_ERROR_INVALID_PTX;
    InvalidGraphicsContext = 219, CUDA_ERROR_INVALID_GRAPHICS_CONTEXT;
    NvlinkUncorrectable = 220, CUDA_ERROR_NVLINK_UNCORRECTABLE;
    JitCompilerNotFound = 221, CUDA_ERROR_JIT_COMPILER_NOT_FOUND;
    UnsupportedPtxVersion = 222, CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    JitCompilationDisabled = 223, CUDA_ERROR_JIT_COMPILATION_DISABLED;
    UnsupportedExecAffinity = 224, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    UnsupportedDevsideSync = 225, CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC;
    Contained = 226, CUDA_ERROR_CONTAINED;
    InsufficientLoaderVersion = 227, CUDA_ERROR_INSUFFICIENT_LOADER_VERSION;
    InvalidSource = 300, CUDA_ERROR_INVALID_SOURCE;
    FileNotFound = 301, CUDA_ERROR_FILE_NOT_FOUND;
    SharedObjectSymbolNotFound = 302, CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    SharedObjectInitFailed = 303, CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
    OperatingSystem = 304, CUDA_ERROR_OPERATING_SYSTEM;
    InvalidHandle = 400, CUDA_ERROR_INVALID_HANDLE;
    IllegalState = 401, CUDA_ERROR_ILLEGAL_STATE;
    LossyQuery = 402, CUDA_ERROR_LOSSY_QUERY;
    NotFound = 500, CUDA_ERROR_NOT_FOUND;
    NotReady = 600, CUDA_ERROR_NOT_READY;
    IllegalAddress = 700, CUDA_ERROR_ILLEGAL_ADDRESS;
    LaunchOutOfResources = 701, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    LaunchTimeout = 702, CUDA_ERROR_LAUNCH_TIMEOUT;
    LaunchIncompatibleTexturing = 703, CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING;
    PeerAccessAlreadyEnabled = 704, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    PeerAccessNotEnabled = 705, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    PrimaryContextActive = 708, CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
    ContextIsDestroyed = 709, CUDA_ERROR_CONTEXT_IS_DESTROYED;
    Assert = 710, CUDA_ERROR_ASSERT;
    TooManyPeers = 711, CUDA_ERROR_TOO_MANY_PEERS;
    HostMemoryAlreadyRegistered = 712, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    HostMemoryNotRegistered = 713, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    HardwareStackError = 714, CUDA_ERROR_HARDWARE_STACK_ERROR;
    IllegalInstruction = 715, CUDA_ERROR_ILLEGAL_INSTRUCTION;
    MisalignedAddress = 716, CUDA_ERROR_MISALIGNED_ADDRESS;
    InvalidAddressSpace = 717, CUDA_ERROR_INVALID_ADDRESS_SPACE;
    InvalidPc = 718, CUDA_ERROR_INVALID_PC;
    LaunchFailed = 719, CUDA_ERROR_LAUNCH_FAILED;
    CooperativeLaunchTooLarge = 720, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    TensorMemoryLeak = 721, CUDA_ERROR_TENSOR_MEMORY_LEAK;
    NotPermitted = 800, CUDA_ERROR_NOT_PERMITTED;
    NotSupported = 801, CUDA_ERROR_NOT_SUPPORTED;
    SystemNotReady = 802, CUDA_ERROR_SYSTEM_NOT_READY;
    SystemDriverMismatch = 803, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    CompatNotSupportedOnDevice = 804, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE;
    MpsConnectionFailed = 805, CUDA_ERROR_MPS_CONNECTION_FAILED;
    MpsRpcFailure = 806, CUDA_ERROR_MPS_RPC_FAILURE;
    MpsServerNotReady = 807, CUDA_ERROR_MPS_SERVER_NOT_READY;
    MpsMaxClientsReached = 808, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED;
    MpsMaxConnectionsReached = 809, CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED;
    MpsClientTerminated = 810, CUDA_ERROR_MPS_CLIENT_TERMINATED;
    CdpNotSupported = 811, CUDA_ERROR_CDP_NOT_SUPPORTED;
    CdpVersionMismatch = 812, CUDA_ERROR_CDP_VERSION_MISMATCH;
    StreamCaptureUnsupported = 900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    StreamCaptureInvalidated = 901, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    StreamCaptureMerge = 902, CUDA_ERROR_STREAM_CAPTURE_MERGE;
    StreamCaptureUnmatched = 903, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    StreamCaptureUnjoined = 904, CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    StreamCaptureIsolation = 905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    StreamCaptureImplicit = 906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    CapturedEvent = 907, CUDA_ERROR_CAPTURED_EVENT;
    StreamCaptureWrongThread = 908, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    Timeout = 909, CUDA_ERROR_TIMEOUT;
    GraphExecUpdateFailure = 910, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    ExternalDevice = 911, CUDA_ERROR_EXTERNAL_DEVICE;
    InvalidClusterSize = 912, CUDA_ERROR_INVALID_CLUSTER_SIZE;
    FunctionNotLoaded = 913, CUDA_ERROR_FUNCTION_NOT_LOADED;
    InvalidResourceType = 914, CUDA_ERROR_INVALID_RESOURCE_TYPE;
    InvalidResourceConfiguration = 915, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    KeyRotation = 916, CUDA_ERROR_KEY_ROTATION;
    StreamDetached = 917, CUDA_ERROR_STREAM_DETACHED;
    GraphRecaptureFailure = 918, CUDA_ERROR_GRAPH_RECAPTURE_FAILURE;
    FabricNotReady = 919, CUDA_ERROR_FABRIC_NOT_READY;
    Unspecified = 999, CUDA_ERROR_UNKNOWN;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_call_and_what_cuda_calls_them() {
        assert_eq!(check(0, || "cuInit"), Ok(()));
        let error = check(2, || "cuMemAlloc_v2").unwrap_err();
        assert_eq!(error.to_string(), "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
        let error = check(2, || "hipMalloc").unwrap_err();
        assert_eq!(error.to_string(), "hipMalloc failed: HIP's error OUT_OF_MEMORY (2)");
        assert_eq!(check(4711, || "cuInit").unwrap_err().code(), Some(Code::Unknown(4711)));
    }
}
