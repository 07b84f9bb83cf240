//! The fields of a vendor's library that programs may set for its communicators.

use std::ffi::CString;

/// Fields of `ncclConfig_t`; what is none is left to the library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "nccl.h has them")]
pub struct NcclFields {
    pub cga_cluster_size: Option<i32>,
    pub min_ctas: Option<i32>,
    pub max_ctas: Option<i32>,
    pub net_name: Option<CString>,
    pub split_share: Option<i32>,
    pub traffic_class: Option<i32>,
    pub collnet_enable: Option<i32>,
    pub cta_policy: Option<i32>,
    pub nvls_ctas: Option<i32>,
}

impl NcclFields {
    /// How they are written, in words.
    pub(super) const FORM: &'static str = "a comma list of NAME=VALUE, where names are cgaClusterSize, minCTAs, maxCTAs, \
                                           netName, splitShare, trafficClass, collnetEnable, CTAPolicy and nvlsCTAs, and \
                                           values but netName's whole numbers";

    /// Reads them as they are written.
    pub(super) fn read(text: &str) -> Option<NcclFields> {
        let mut fields = NcclFields::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=')?;
            let value = value.trim();
            let field = match name.trim() {
                "netName" => {
                    fields.net_name = Some(CString::new(value).ok()?);
                    continue;
                }
                "cgaClusterSize" => &mut fields.cga_cluster_size,
                "minCTAs" => &mut fields.min_ctas,
                "maxCTAs" => &mut fields.max_ctas,
                "splitShare" => &mut fields.split_share,
                "trafficClass" => &mut fields.traffic_class,
                "collnetEnable" => &mut fields.collnet_enable,
                "CTAPolicy" => &mut fields.cta_policy,
                "nvlsCTAs" => &mut fields.nvls_ctas,
                _ => return None,
            };
            *field = Some(value.parse().ok()?);
        }
        Some(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_set_by_the_names_of_nccl() {
        let fields =
            NcclFields::read("minCTAs=4, maxCTAs=16,netName=IB,splitShare=1,CTAPolicy=2,").expect("five fields");
        let expected = NcclFields {
            min_ctas: Some(4),
            max_ctas: Some(16),
            net_name: Some(c"IB".to_owned()),
            split_share: Some(1),
            cta_policy: Some(2),
            ..NcclFields::default()
        };
        assert_eq!(fields, expected);
        assert_eq!(NcclFields::read(""), Some(NcclFields::default()));
        for wrong in ["minCTAs", "minCTAs=few", "min_ctas=4", "blocking=1", "netName=a\0b"] {
            assert_eq!(NcclFields::read(wrong), None, "{wrong}");
        }
    }
}
