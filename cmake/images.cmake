# Device code inside the library. clang compiles src/cuda/kernels.cu to PTX once, which drivers compile for the GPU that is there; where ptxas is
# found, it makes machine code of it for each architecture beforehand. All of it becomes arrays of bytes in place of src/cuda/images.c, which has none. nvcc's own front end takes functions that
# say nothing for the host's, and refuses what the kernels share with core/.
#
#   cmake -D OUTPUT=file.c -D IMAGES=compute=file;compute=file... -P images.cmake    writes the table

set(images_script ${CMAKE_CURRENT_LIST_FILE})

function(halfstep_device_images result)
  # The least compute capability, of which the PTX is, and those that get machine code, newest first.
  set(HALFSTEP_CUDA_PTX 80)
  set(HALFSTEP_CUDA_ARCHITECTURES 90 89 86 80 CACHE STRING "Architectures that get machine code, newest first, where ptxas is found")
  set(source ${PROJECT_SOURCE_DIR}/src/cuda/kernels.cu)
  set(output ${PROJECT_BINARY_DIR}/cuda_images.c)
  set(images "")
  set(files "")
  set(${result} ${PROJECT_SOURCE_DIR}/src/cuda/images.c PARENT_SCOPE)
  if(HALFSTEP_CUDA)
    find_program(HALFSTEP_CLANG clang DOC "Compiler of device code")
    find_program(HALFSTEP_PTXAS ptxas HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin DOC "Assembler of device code")
    mark_as_advanced(HALFSTEP_CLANG HALFSTEP_PTXAS)
    if(NOT HALFSTEP_CLANG)
      message(FATAL_ERROR "HALFSTEP_CUDA=ON but clang was not found")
    endif()
    set(ptx ${PROJECT_BINARY_DIR}/kernels.ptx)
    add_custom_command(OUTPUT ${ptx}
      COMMAND ${HALFSTEP_CLANG} -x cuda --cuda-device-only --cuda-gpu-arch=sm_${HALFSTEP_CUDA_PTX} -nocudainc -nocudalib -Xclang -target-feature
              -Xclang +ptx74 -ffp-contract=off -std=c++17 -O2 -Wno-everything -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
              -MD -MF ${ptx}.d -MT ${ptx} -S -o ${ptx} ${source}
      DEPENDS ${source} DEPFILE ${ptx}.d)
    if(HALFSTEP_PTXAS)
      foreach(architecture IN LISTS HALFSTEP_CUDA_ARCHITECTURES)
        set(cubin ${PROJECT_BINARY_DIR}/kernels.sm_${architecture}.cubin)
        add_custom_command(OUTPUT ${cubin} COMMAND ${HALFSTEP_PTXAS} -arch=sm_${architecture} --fmad=false -o ${cubin} ${ptx} DEPENDS ${ptx})
        list(APPEND images ${architecture}=${cubin})
        list(APPEND files ${cubin})
      endforeach()
    endif()
    list(APPEND images 0=${ptx})
    list(APPEND files ${ptx})
    add_custom_command(OUTPUT ${output}
      COMMAND ${CMAKE_COMMAND} -D OUTPUT=${output} -D "IMAGES=${images}" -P ${images_script}
      DEPENDS ${files} ${images_script} VERBATIM)
    set(${result} ${output} PARENT_SCOPE)
  endif()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE)
  set(arrays "")
  set(rows "")
  foreach(image IN LISTS IMAGES)
    string(REGEX MATCH "^([0-9]+)=(.*)$" image "${image}")
    set(compute ${CMAKE_MATCH_1})
    file(READ "${CMAKE_MATCH_2}" bytes HEX)
    # PTX is a text, which ends with a 0.
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}00")
    string(APPEND arrays "static const _Alignas(64) unsigned char image_${compute}[] = {${bytes}};\n")
    string(APPEND rows "    {${compute}, image_${compute}, sizeof image_${compute}},\n")
  endforeach()
  file(WRITE "${OUTPUT}" "#include \"cuda/images.h\"\n${arrays}const struct hstep_cuda_image hstep_cuda_images[] = {\n${rows}    {0, 0, 0}};\n")
endif()
