//! Rank-grid arithmetic: which ranks form a group along each dimension of a mesh.

/// Splits `0..shape.product()` ranks, laid out row-major over `shape`, into the groups along dimension `dim`.
///
/// ```
/// use ncclx_rs_device_mesh::groups;
/// assert_eq!(groups(&[2, 3], 1), [vec![0, 1, 2], vec![3, 4, 5]]);
/// assert_eq!(groups(&[2, 3], 0), [vec![0, 3], vec![1, 4], vec![2, 5]]);
/// ```
///
/// # Panics
/// When `dim` is not a dimension of `shape`.
pub fn groups(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
    let stride: usize = shape[dim + 1..].iter().product();
    let size: usize = shape.iter().product();
    (0..size)
        .filter(|rank| (rank / stride).is_multiple_of(shape[dim]))
        .map(|first| (0..shape[dim]).map(|step| first + step * stride).collect())
        .collect()
}
