// The few names of CANN's runtime that the binding uses, for a machine without CANN. A test sets the answers.
#pragma once

#include <cstdint>
#include <cstdlib>

using aclrtStream = void*;
using aclError = int;
constexpr aclError ACL_SUCCESS = 0;
enum aclrtDevAttr {
    ACL_DEV_ATTR_AICORE_CORE_NUM = 101,
    ACL_DEV_ATTR_CUBE_CORE_NUM = 102,
    ACL_DEV_ATTR_VECTOR_CORE_NUM = 201
};

inline const char* aclrtGetSocName()
{
    const char* name = std::getenv("FAKE_SOC");
    return name == nullptr ? "Ascend910B3" : name;
}

inline aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value)
{
    const char* cores = std::getenv("FAKE_CORES");
    *value = cores == nullptr ? 2 : std::atoi(cores);
    if (attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM) *value *= 2;
    return ACL_SUCCESS;
}
