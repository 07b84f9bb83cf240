//! `ncclConfig_t`, as long as the loaded library has it.

use std::ffi::c_int;
use std::mem::offset_of;

use crate::config::NcclFields;

/// The structure of the newest version that is known. Each version appends to that of the one before.
#[derive(Clone, Debug)]
#[repr(C)]
pub(super) struct Config {
    /// The bytes that the library may read and write.
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: usize,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: usize,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    /// From 2.28 on.
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
    /// From 2.29 on.
    graph_usage_mode: c_int,
    num_rma_ctx: c_int,
    /// From 2.30 on.
    max_p2p_peers: c_int,
    graph_stream_ordering: c_int,
    /// From 2.31 on.
    launch_order_implicit: c_int,
    num_rma_sig: c_int,
    rma_eager_init: c_int,
    host_cft_mode: c_int,
    /// From 2.32 on.
    nvls_host_mode: c_int,
}

/// The bytes that the structure has from a version on, by `NCCL_VERSION_CODE`.
const SIZES: [(u32, usize); 6] = [
    (23_200, size_of::<Config>()),
    (23_100, offset_of!(Config, nvls_host_mode)),
    (23_000, offset_of!(Config, launch_order_implicit)),
    (22_900, offset_of!(Config, max_p2p_peers)),
    (22_800, offset_of!(Config, graph_usage_mode)),
    (22_700, offset_of!(Config, channels_per_net_peer)),
];

// As nccl.h of each version has them.
const _: () = {
    assert!(SIZES[0].1 == 120 && SIZES[1].1 == 112 && SIZES[2].1 == 96);
    assert!(SIZES[3].1 == 88 && SIZES[4].1 == 80 && SIZES[5].1 == 72);
    assert!(offset_of!(Config, net_name) == 32 && offset_of!(Config, comm_name) == 48);
};

impl Config {
    /// That of a communicator which never blocks, for a library of this `NCCL_VERSION_CODE`; all but the fields as the library
    /// has it. It refers to their name, which has to stay.
    pub(super) fn non_blocking(version: u32, fields: &NcclFields) -> Config {
        let set = |field: Option<i32>| field.unwrap_or(UNDEFINED);
        let size =
            SIZES.iter().find(|(since, _)| version >= *since).map_or(SIZES[SIZES.len() - 1].1, |(_, size)| *size);
        Config {
            size,
            magic: MAGIC,
            version,
            blocking: 0,
            cga_cluster_size: set(fields.cga_cluster_size),
            min_ctas: set(fields.min_ctas),
            max_ctas: set(fields.max_ctas),
            net_name: fields.net_name.as_ref().map_or(0, |name| name.as_ptr().expose_provenance()),
            split_share: set(fields.split_share),
            traffic_class: set(fields.traffic_class),
            comm_name: 0,
            collnet_enable: set(fields.collnet_enable),
            cta_policy: set(fields.cta_policy),
            shrink_share: UNDEFINED,
            nvls_ctas: set(fields.nvls_ctas),
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
            graph_usage_mode: UNDEFINED,
            num_rma_ctx: UNDEFINED,
            max_p2p_peers: UNDEFINED,
            graph_stream_ordering: UNDEFINED,
            launch_order_implicit: UNDEFINED,
            num_rma_sig: UNDEFINED,
            rma_eager_init: UNDEFINED,
            host_cft_mode: UNDEFINED,
            nvls_host_mode: UNDEFINED,
        }
    }
}

/// `NCCL_API_MAGIC`.
const MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_gets_as_much_as_it_knows() {
        let sizes = [22_703, 22_809, 22_907, 23_007, 23_102, 23_203, 24_000];
        let fields = NcclFields { min_ctas: Some(4), net_name: Some(c"IB".to_owned()), ..NcclFields::default() };
        let sizes = sizes.map(|version| Config::non_blocking(version, &fields).size);
        assert_eq!(sizes, [72, 80, 88, 96, 112, 120, 120]);
        let config = Config::non_blocking(22_809, &fields);
        assert_eq!((config.magic, config.version, config.blocking, config.split_share), (MAGIC, 22_809, 0, c_int::MIN));
        assert_eq!((config.min_ctas, config.max_ctas, config.comm_name), (4, c_int::MIN, 0));
        assert_eq!(Some(config.net_name), fields.net_name.map(|name| name.as_ptr().addr()));
    }
}
